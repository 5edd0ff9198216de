package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// ShimName is the name under which this program stands in for runc. Its settings lie beside the link: NAME.json.
const ShimName = "runc-shim"

// ShimSettings says what to take out of a container's configuration, because this machine cannot do it.
type ShimSettings struct {
	Runc        string `json:"runc"`
	DropSeccomp bool   `json:"dropSeccomp"` // runc was built without libseccomp
	UserMode    bool   `json:"userMode"`    // one user id, no control groups
}

// RunShim edits the configuration that containerd has just written, and becomes runc.
func RunShim() int {
	text, err := os.ReadFile(os.Args[0] + ".json")
	if err != nil {
		return fail(err)
	}
	var settings ShimSettings
	if err := json.Unmarshal(text, &settings); err != nil {
		return fail(err)
	}
	if err := editFiles(os.Args, settings); err != nil {
		return fail(err)
	}
	os.Args[0] = settings.Runc
	return fail(syscall.Exec(settings.Runc, os.Args, os.Environ()))
}

func fail(err error) int {
	os.Stderr.WriteString(ShimName + ": " + err.Error() + "\n") //nolint:errcheck // nobody else to tell
	return 1
}

// editFiles finds the files by runc's arguments: a bundle to create a container from, a process to run in one.
func editFiles(args []string, settings ShimSettings) error {
	if bundle := flagValue(args, "bundle", "b"); bundle != "" {
		return edit(filepath.Join(bundle, "config.json"), func(config map[string]any) {
			editContainer(config, settings)
		})
	}
	if process := flagValue(args, "process", "p"); process != "" && settings.UserMode {
		return edit(process, editProcess)
	}
	return nil
}

func flagValue(args []string, long, short string) string {
	for i, arg := range args {
		name, value, joined := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !strings.HasPrefix(arg, "-") || (name != long && name != short) {
			continue
		}
		if joined {
			return value
		}
		if i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}

func edit(path string, change func(map[string]any)) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var config map[string]any
	if err := json.Unmarshal(text, &config); err != nil {
		return err
	}
	change(config)
	if text, err = json.Marshal(config); err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o600)
}

func editContainer(config map[string]any, settings ShimSettings) {
	linux, _ := config["linux"].(map[string]any)
	if settings.DropSeccomp {
		delete(linux, "seccomp")
	}
	if !settings.UserMode {
		return
	}
	delete(linux, "cgroupsPath")
	delete(linux, "resources")
	if process, ok := config["process"].(map[string]any); ok {
		editProcess(process)
	}
	mounts, _ := config["mounts"].([]any)
	for _, each := range mounts {
		mount, _ := each.(map[string]any)
		options, _ := mount["options"].([]any)
		// The terminal group of a normal machine does not exist where there is one group id.
		mount["options"] = slices.DeleteFunc(options, func(option any) bool { return option == "gid=5" })
	}
}

// editProcess maps every user to the only one there is.
func editProcess(process map[string]any) {
	delete(process, "oomScoreAdj")
	if user, ok := process["user"].(map[string]any); ok {
		user["uid"], user["gid"] = 0, 0
		delete(user, "additionalGids")
	}
}
