"""Modules of Python's library, and names in its modules, that Windows and macOS do not have."""

from __future__ import annotations

import os
import signal

MODULES_OF_POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
"""Modules that Windows does not have."""

_OPENING = "O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_RSYNC O_SYNC O_TMPFILE"
_PROCESSES = "fork forkpty killpg posix_spawn posix_spawnp register_at_fork wait wait3 wait4 nice getpriority setpriority"
_USERS = "getegid geteuid getgid getgroups getpgid getpgrp getresgid getresuid getsid getuid initgroups setegid seteuid setgid setgroups"
_USERS += " setpgid setsid setuid"
_FILES = "chown chroot fchdir fchmod fchown fdatasync fpathconf fstatvfs getxattr lchown listxattr lockf mkfifo mknod openpty pathconf"
_FILES += " posix_fadvise posix_fallocate pread preadv pwrite pwritev readv removexattr sendfile setxattr statvfs sync writev"
_FACTS = "confstr ctermid getloadavg major makedev minor sysconf sysconf_names tcgetpgrp tcsetpgrp ttyname uname"
_LINUX = "O_DIRECT O_PATH O_TMPFILE copy_file_range eventfd fdatasync getrandom getxattr listxattr memfd_create pidfd_open posix_fadvise"
_LINUX += " posix_fallocate removexattr sched_getaffinity sched_setaffinity setxattr splice"

OS_OF_LINUX = {*_LINUX.split(), *(name for name in dir(os) if name.startswith(("POSIX_FADV_", "SCHED_", "XATTR_", "EFD_")))}
"""Names in ``os`` that macOS does not have."""
OS_OF_POSIX = OS_OF_LINUX | {"POSIX_SPAWN_OPEN", "POSIX_SPAWN_CLOSE", "POSIX_SPAWN_DUP2", "sched_yield"}
OS_OF_POSIX |= {name for text in (_OPENING, _PROCESSES, _USERS, _FILES, _FACTS) for name in text.split()}
"""Names in ``os`` that Windows does not have."""
SIGNALS_OF_POSIX = {name for name in dir(signal) if name.startswith("SIG")}
SIGNALS_OF_POSIX -= {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
SIGNALS_OF_POSIX |= {"alarm", "pause", "setitimer"}
"""Names in ``signal`` that Windows does not have."""
C_OF_LINUX = {"malloc_trim", "renameat2"}
"""Functions that ``ctypes`` finds only in Linux's C library."""
