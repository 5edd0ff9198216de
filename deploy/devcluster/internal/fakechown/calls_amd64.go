package fakechown

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_X86_64

var chownCalls = []uint32{unix.SYS_CHOWN, unix.SYS_LCHOWN, unix.SYS_FCHOWN, unix.SYS_FCHOWNAT}
