package node

import (
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"zerotrain.dev/devcluster/internal/instance"
)

// Init is the first process of the node's namespaces: it builds what is in them, starts the supervisor inside with the files it was
// passed, and collects the children that others leave behind. When it ends, everything in its namespaces ends.
func Init(inst instance.Instance, program string, passed ...*os.File) error {
	settings, err := inst.ReadSettings()
	if err != nil {
		return err
	}
	needed, err := neededPaths(inst, settings, program)
	if err != nil {
		return err
	}
	if err := buildMounts(inst, needed); err != nil {
		return err
	}
	if err := buildNetwork(); err != nil {
		return err
	}
	files := append([]*os.File{os.Stdin, os.Stdout, os.Stderr}, passed...)
	argv := []string{program, "supervise", "--inside", "--root", inst.Root, "--name", inst.Name}
	supervisor, err := os.StartProcess(program, argv, &os.ProcAttr{Files: files, Env: environment(settings), Dir: "/"})
	if err != nil {
		return err
	}
	return reapUntil(supervisor.Pid)
}

// neededPaths are the files of the host that the node's programs open, by the names they use and by what these resolve to.
func neededPaths(inst instance.Instance, settings instance.Settings, program string) ([]string, error) {
	needed := []string{inst.Dir(), filepath.Dir(program), settings.BinDir, ImagesDir(settings)}
	for _, tool := range Tools {
		target, err := filepath.EvalSymlinks(filepath.Join(settings.BinDir, tool))
		if err != nil {
			return nil, err
		}
		needed = append(needed, filepath.Dir(target))
	}
	for _, image := range append([]string{PauseArchive(settings)}, settings.Images...) {
		target, err := filepath.EvalSymlinks(image)
		if err != nil {
			return nil, err
		}
		needed = append(needed, filepath.Dir(image), filepath.Dir(target))
	}
	return needed, nil
}

// environment of every program inside: the shim must be found by its name, and nothing may be written to folders of the host.
func environment(settings instance.Settings) []string {
	ours := []string{
		"PATH=" + settings.BinDir + ":" + os.Getenv("PATH") + ":/usr/sbin:/sbin",
		"HOME=" + inside("data"), "TMPDIR=" + inside("data"), "XDG_RUNTIME_DIR=/run",
	}
	// Of two settings of one name a program sees the first.
	for _, setting := range os.Environ() {
		name, _, _ := strings.Cut(setting, "=")
		if !slices.ContainsFunc(ours, func(own string) bool { return strings.HasPrefix(own, name+"=") }) {
			ours = append(ours, setting)
		}
	}
	return ours
}

// reapUntil passes SIGTERM on to the supervisor and returns when that has ended.
func reapUntil(supervisor int) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for range stop {
			unix.Kill(supervisor, unix.SIGTERM) //nolint:errcheck // it may have ended
		}
	}()
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case pid != supervisor:
			continue
		case status.ExitStatus() != 0:
			log.Printf("the supervisor inside ended with status %#x", int(status))
			return fmt.Errorf("the supervisor inside the node failed")
		}
		return nil
	}
}

// run starts a program inside the node and returns what it printed if it fails.
func run(argv ...string) error {
	output, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, output)
	}
	return nil
}
