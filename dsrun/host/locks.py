"""Signs of a file system without locks. Sent to hosts as part of the probe."""

import errno

NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO)
"""Errors of flock(2) where the file system has no locks."""
