package supervisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/node"
)

// What each profile needs beside this program.
var tools = map[instance.Profile][]string{
	instance.Simulated: {"kwok"},
	instance.Node:      node.Tools,
}

// CheckTools says which tools of the profile are not in the folder.
func CheckTools(settings instance.Settings) error {
	var missing []string
	for _, tool := range tools[settings.Profile] {
		if _, err := os.Stat(filepath.Join(settings.BinDir, tool)); err != nil {
			missing = append(missing, tool)
		}
	}
	if settings.Profile == instance.Node {
		if _, err := os.Stat(node.PauseArchive(settings)); err != nil {
			missing = append(missing, "the image "+node.PauseArchive(settings))
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("--bin-dir %s lacks %s, which --profile %s needs; build them: python deploy/devcluster/build.py tools --profile %s",
			settings.BinDir, strings.Join(missing, ", "), settings.Profile, settings.Profile)
	}
	return nil
}

// Adapt settles what depends on the machine. tell is called with what a person should know about it.
func Adapt(inst instance.Instance, settings *instance.Settings, tell func(string)) error {
	if settings.Profile != instance.Node {
		return nil
	}
	return node.Adapt(inst, settings, tell)
}

// CleanUp removes what an instance has left outside its processes: control groups and its folder. The caller holds the lock, so no
// supervisor runs; processes that were killed with it may take a moment to go.
func CleanUp(inst instance.Instance) error {
	if err := node.RemoveCgroups(inst); err != nil {
		return err
	}
	const patience = 30 * time.Second
	deadline := time.Now().Add(patience)
	for {
		err := inst.Remove()
		if errors.Is(err, fs.ErrPermission) {
			openFolders(inst.Dir())
			err = inst.Remove()
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// openFolders makes an ordinary user's own folders writable: images hold some that are not, and those cannot be emptied.
func openFolders(root string) {
	filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error { //nolint:errcheck // removing tells what is left
		if entry != nil && entry.IsDir() {
			os.Chmod(path, 0o700) //nolint:errcheck // the same
		}
		return nil
	})
}
