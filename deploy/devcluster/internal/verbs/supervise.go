package verbs

import (
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"zerotrain.dev/devcluster/internal/supervisor"
)

// Files that `up` hands to the daemon: the pipe it reads events from, and the instance's lock, held as long as the daemon lives.
const reportFD, lockFD = 3, 4

// superviseCommand is the daemon. Nobody types it.
func superviseCommand(flags *common) *cobra.Command {
	return &cobra.Command{
		Use:    "supervise",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			syscall.CloseOnExec(reportFD) // components must not hold either of them open
			syscall.CloseOnExec(lockFD)
			inst, err := flags.instance()
			if err != nil {
				return err
			}
			program, err := os.Executable()
			if err != nil {
				return err
			}
			reporter := supervisor.NewReporter(os.NewFile(reportFD, "report"))
			daemon, err := supervisor.New(inst, program, reporter)
			if err != nil {
				reporter.Failure(err)
				return err
			}
			err = daemon.Run()
			if daemon.MustCleanUp() {
				defer inst.Unlock(os.NewFile(lockFD, "lock"))
				return supervisor.CleanUp(inst)
			}
			return err
		},
	}
}
