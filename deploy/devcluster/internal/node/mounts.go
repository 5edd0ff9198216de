package node

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"zerotrain.dev/devcluster/internal/instance"
)

// Folders of the host into which the node's programs write at fixed paths: links to pods' logs, CNI results, device plugin sockets. They
// are covered, so that nothing of it reaches the host.
var covered = []string{"/run", "/var/lib", "/var/log"}

// What the kubelet would set on the whole machine. It finds these values instead, and leaves the machine as it is.
var kernelSettings = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// buildMounts prepares the mount namespace. needed are paths that must stay visible under the covered folders.
func buildMounts(inst instance.Instance, needed []string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making the mounts private: %w", err)
	}
	folder, err := unix.Open(inst.Dir(), unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(folder)
	for _, cover := range covered {
		if err := coverFolder(cover, needed); err != nil {
			return err
		}
	}
	if err := bindOpened(folder, Inside, true); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mounting /proc: %w (a container whose /proc is masked does not allow it: run it with --privileged)", err)
	}
	if err := fixKernelSettings(inst); err != nil {
		return err
	}
	// Mounts of containers are made in this namespace and seen by all of it.
	return unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

// coverFolder puts an empty file system over a folder, and the needed paths under it back in place.
func coverFolder(cover string, needed []string) error {
	type kept struct {
		path     string
		file     int
		isFolder bool
	}
	var keep []kept
	for _, path := range outermost(needed, cover) {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		file, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(file)
		keep = append(keep, kept{path: path, file: file, isFolder: info.IsDir()})
	}
	if err := unix.Mount("tmpfs", cover, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("covering %s: %w", cover, err)
	}
	for _, each := range keep {
		if err := bindOpened(each.file, each.path, each.isFolder); err != nil {
			return err
		}
	}
	return nil
}

// outermost picks the paths below folder, without those that another of them contains.
func outermost(paths []string, folder string) []string {
	sorted := append([]string(nil), paths...)
	sort.Strings(sorted)
	var picked []string
	for _, path := range sorted {
		isBelow := strings.HasPrefix(path, folder+"/")
		isContained := len(picked) > 0 && strings.HasPrefix(path+"/", picked[len(picked)-1]+"/")
		if isBelow && !isContained {
			picked = append(picked, path)
		}
	}
	return picked
}

// bindOpened mounts an open file or folder at path, which is created: by its open file, since its name is covered by now.
func bindOpened(file int, path string, isFolder bool) error {
	parent := path
	if !isFolder {
		parent = filepath.Dir(path)
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	if !isFolder {
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			return err
		}
	}
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", file), path, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("binding %s: %w", path, err)
	}
	return nil
}

func fixKernelSettings(inst instance.Instance) error {
	for name, value := range kernelSettings {
		target := filepath.Join("/proc/sys", name)
		if _, err := os.Stat(target); err != nil {
			continue // this kernel has no such setting
		}
		stand := inst.Path("config", "kernel-"+strings.ReplaceAll(name, "/", "-"))
		if err := os.WriteFile(stand, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(stand, target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("standing in for %s: %w", target, err)
		}
	}
	return nil
}
