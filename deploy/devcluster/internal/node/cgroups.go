package node

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"zerotrain.dev/devcluster/internal/instance"
)

const cgroupMount = "/sys/fs/cgroup"

// Controllers of a version 1 machine without which the kubelet does not start.
var neededControllers = []string{"cpu", "cpuacct", "cpuset", "memory", "pids"}

// Those of version 2 that the kubelet counts a group by, as far as the machine has them.
var wantedControllers = []string{"cpu", "cpuset", "memory", "hugetlb", "pids"}

// IsCgroupV2 tells whether the machine has the one hierarchy of version 2. A hybrid machine counts as version 1: there the controllers are.
func IsCgroupV2() bool {
	var stat unix.Statfs_t
	return unix.Statfs(cgroupMount, &stat) == nil && stat.Type == unix.CGROUP2_SUPER_MAGIC
}

// hierarchies lists the folders in which the instance needs a group.
func hierarchies() ([]string, error) {
	if IsCgroupV2() {
		return []string{cgroupMount}, nil
	}
	entries, err := os.ReadDir(cgroupMount)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, entry := range entries {
		path := filepath.Join(cgroupMount, entry.Name())
		var stat unix.Statfs_t
		if unix.Statfs(path, &stat) == nil && stat.Type == unix.CGROUP_SUPER_MAGIC {
			found = append(found, path)
		}
	}
	for _, controller := range neededControllers {
		if !slices.Contains(found, filepath.Join(cgroupMount, controller)) {
			return nil, fmt.Errorf("cgroup controller %q is not mounted at %s/%s, and the kubelet needs it; mount it, or use --profile control-plane",
				controller, cgroupMount, controller)
		}
	}
	return found, nil
}

// createCgroups makes the instance's group everywhere. It needs root.
func createCgroups(inst instance.Instance) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		group := filepath.Join(root, CgroupName(inst))
		if err := os.Mkdir(group, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("control group %s: %w; the node needs write access to %s (in a container: --privileged), or use --profile control-plane",
				group, err, cgroupMount)
		}
		if IsCgroupV2() {
			err = delegateControllers(root, group)
		} else {
			err = copyCpuset(root, group)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyCpuset: a new group of version 1 has no processors and no memory until someone writes them.
func copyCpuset(root, group string) error {
	if filepath.Base(root) != "cpuset" {
		return nil
	}
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		value, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(group, file), bytes.TrimSpace(value), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// delegateControllers switches on what the kubelet wants to find in a group of version 2, where it is not on already.
func delegateControllers(root, group string) error {
	for _, folder := range []string{root, group} {
		available, err := readWords(folder, "cgroup.controllers")
		if err != nil {
			return err
		}
		enabled, err := readWords(folder, "cgroup.subtree_control")
		if err != nil {
			return err
		}
		for _, controller := range wantedControllers {
			if !slices.Contains(available, controller) || slices.Contains(enabled, controller) {
				continue
			}
			if err := os.WriteFile(filepath.Join(folder, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
				return fmt.Errorf("control group %s: switching %s on: %w; in a container use the host's control groups (--cgroupns=host), "+
					"or use --profile control-plane", folder, controller, err)
			}
		}
	}
	return nil
}

func readWords(folder, file string) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(folder, file))
	return strings.Fields(string(text)), err
}

// RemoveCgroups removes what createCgroups and the kubelet made. Processes that were just killed may hold a group for a moment.
func RemoveCgroups(inst instance.Instance) error {
	entries, err := os.ReadDir(cgroupMount)
	if err != nil {
		return nil // no control groups here, so none of ours
	}
	groups := []string{filepath.Join(cgroupMount, CgroupName(inst))}
	for _, entry := range entries {
		groups = append(groups, filepath.Join(cgroupMount, entry.Name(), CgroupName(inst)))
	}
	const patience = 30 * time.Second
	deadline := time.Now().Add(patience)
	for _, group := range groups {
		for {
			err := removeTree(group)
			if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("control group %s: %w", group, err)
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	return nil
}

// removeTree removes groups, innermost first; their files go with them and cannot be removed one by one.
func removeTree(group string) error {
	entries, err := os.ReadDir(group)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := removeTree(filepath.Join(group, entry.Name())); err != nil {
				return err
			}
		}
	}
	return unix.Rmdir(group)
}
