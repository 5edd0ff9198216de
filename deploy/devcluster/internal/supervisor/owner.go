package supervisor

import (
	"golang.org/x/sys/unix"
)

// whenGone calls then once the process has ended, or at once if it is not there. A pidfd cannot be fooled by a number that is reused.
func whenGone(pid int, then func()) error {
	process, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		then()
		return nil
	}
	if err != nil {
		return err
	}
	unix.CloseOnExec(process)
	go func() {
		defer unix.Close(process)
		for {
			_, err := unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, -1)
			if err != unix.EINTR {
				then()
				return
			}
		}
	}()
	return nil
}
