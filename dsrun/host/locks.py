"""What tells that a file system has no locks. The probe takes this file along to other hosts."""

import errno

NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EIO)
"""What flock(2) fails with where the file system has none."""
