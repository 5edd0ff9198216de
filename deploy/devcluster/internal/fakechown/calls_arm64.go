package fakechown

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_AARCH64

var chownCalls = []uint32{unix.SYS_FCHOWN, unix.SYS_FCHOWNAT}
