// Package fakechown makes "change the owner" succeed without doing anything, for this process and all that it starts.
//
// In a user namespace with one user id, every file belongs to that one, and changing an owner to any other fails. The kubelet does so for
// volumes of pods with fsGroup or runAsUser, containerd for files of images. Since every container runs as the one user as well, nobody
// misses the change: a system call filter answers for the kernel.
package fakechown

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Verb is the hidden command: VERB PROGRAM [ARGUMENTS].
const Verb = "without-chown"

// Exec installs the filter and becomes the program.
func Exec(argv []string) error {
	if len(argv) == 0 {
		return fmt.Errorf("%s: no program given", Verb)
	}
	// A filter belongs to a thread, and exec keeps that of the thread that calls it.
	runtime.LockOSThread()
	if err := install(); err != nil {
		return fmt.Errorf("system call filter: %w", err)
	}
	return fmt.Errorf("%s: %w", argv[0], syscall.Exec(argv[0], argv, os.Environ()))
}

// Offsets in struct seccomp_data.
const offsetNumber, offsetArch = 0, 4

func install() error {
	filter := program()
	header := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&header)))
	if errno != 0 {
		return errno
	}
	return nil
}

// program: another architecture's numbers mean other calls, so they pass; ours in the list return 0; all others pass.
func program() []unix.SockFilter {
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	answer := func(value uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value} }
	equal := func(value uint32, skipIf, skipElse uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jt: skipIf, Jf: skipElse}
	}
	filter := []unix.SockFilter{load(offsetArch), equal(auditArch, 1, 0), answer(unix.SECCOMP_RET_ALLOW), load(offsetNumber)}
	for i, number := range chownCalls {
		filter = append(filter, equal(number, uint8(len(chownCalls)-i), 0)) // jump over the rest and the "allow"
	}
	return append(filter, answer(unix.SECCOMP_RET_ALLOW), answer(unix.SECCOMP_RET_ERRNO))
}
