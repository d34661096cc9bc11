"""Why a job died."""
