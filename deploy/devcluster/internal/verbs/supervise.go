package verbs

import (
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"zerotrain.dev/devcluster/internal/fakechown"
	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/node"
	"zerotrain.dev/devcluster/internal/supervisor"
)

// Files that `up` hands to the daemon: the pipe it reads events from, and the instance's lock, held as long as the daemon lives. The
// daemon of a node hands them on to the processes inside.
const reportFD, lockFD = 3, 4

// superviseCommand is the daemon. Nobody types it.
func superviseCommand(flags *common) *cobra.Command {
	var inside bool
	command := &cobra.Command{
		Use:    "supervise",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(*cobra.Command, []string) error { return supervise(*flags, inside) },
	}
	command.Flags().BoolVar(&inside, "inside", false, "in the node's namespaces already")
	return command
}

func supervise(flags common, inside bool) error {
	syscall.CloseOnExec(reportFD) // components must not hold either of them open
	syscall.CloseOnExec(lockFD)
	report, lock := os.NewFile(reportFD, "report"), os.NewFile(lockFD, "lock")
	reporter := supervisor.NewReporter(report)
	inst, program, err := self(flags)
	if err != nil {
		reporter.Failure(err)
		return err
	}
	settings, err := inst.ReadSettings()
	if err != nil {
		reporter.Failure(err)
		return err
	}
	var mustCleanUp bool
	if settings.Profile == instance.Node && !inside {
		mustCleanUp, err = supervisor.RunOutside(inst, program, report, lock)
		if err != nil {
			reporter.Failure(err) // the processes inside have told better, if they could
		}
	} else {
		mustCleanUp, err = supervisor.New(inst, settings, program, reporter).Run()
	}
	if mustCleanUp {
		defer inst.Unlock(lock)
		return supervisor.CleanUp(inst)
	}
	return err
}

// nodeInitCommand is the first process of a node's namespaces.
func nodeInitCommand(flags *common) *cobra.Command {
	return &cobra.Command{
		Use:    node.InitVerb,
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			report, lock := os.NewFile(reportFD, "report"), os.NewFile(lockFD, "lock")
			inst, program, err := self(*flags)
			if err == nil {
				err = node.Init(inst, program, report, lock)
			}
			if err != nil {
				supervisor.NewReporter(report).Failure(err)
			}
			return err
		},
	}
}

// nodeProbeCommand tries in fresh namespaces what a node will need.
func nodeProbeCommand() *cobra.Command {
	return &cobra.Command{
		Use:    node.ProbeVerb,
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(*cobra.Command, []string) error { return node.Probe() },
	}
}

// withoutChownCommand starts a component of a node in a user namespace.
func withoutChownCommand() *cobra.Command {
	return &cobra.Command{
		Use:                fakechown.Verb,
		Hidden:             true,
		DisableFlagParsing: true, // they are the program's
		RunE:               func(_ *cobra.Command, argv []string) error { return fakechown.Exec(argv) },
	}
}

func self(flags common) (instance.Instance, string, error) {
	inst, err := flags.instance()
	if err != nil {
		return inst, "", err
	}
	program, err := os.Executable()
	return inst, program, err
}
