package process

import (
	"fmt"
	"io"
	"os"
	"strings"
)

// Failure says which component did not come up, what it said last, and what a person can do about it.
type Failure struct {
	Component string
	Reason    string
	LogPath   string
	LogTail   []string
}

func (f *Failure) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s: %s\n", f.Component, f.Reason)
	for _, line := range f.LogTail {
		fmt.Fprintf(&text, "  | %s\n", line)
	}
	text.WriteString(advice(f.LogTail))
	return text.String()
}

// What components of a cluster say on machines that lack something, and the way out.
var advices = []struct{ said, do string }{
	{"address already in use", "another program took the port in that moment: run the command again"},
	{"no space left on device", "free some disk space, or put the instance elsewhere with --root"},
	{"too many open files", "raise the limits: ulimit -n 65536, sysctl fs.inotify.max_user_instances=512"},
	{"cannot allocate memory", "the profile needs about 1 GB of free memory"},
	{"no such file or directory", "a tool of the profile may be missing from --bin-dir: build the tools of this profile again"},
	{"operation not permitted", "this machine forbids something that the node needs; run as root, or use --profile control-plane"},
	{"permission denied", "this machine forbids something that the node needs; run as root, or use --profile control-plane"},
	{"no stages found", "the stage file of the simulated nodes is missing: build the tools again"},
}

func advice(lines []string) string {
	said := strings.ToLower(strings.Join(lines, "\n"))
	for _, known := range advices {
		if strings.Contains(said, known.said) {
			return "What to do: " + known.do
		}
	}
	return "What to do: the lines above are the end of the component's log; the same command with --keep leaves the whole folder"
}

// Tail returns the last lines of a file, or none when it cannot be read. Long lines are cut.
func Tail(path string, numLines int) []string {
	const window, width = 16 << 10, 400
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil && info.Size() > window {
		file.Seek(-window, io.SeekEnd) //nolint:errcheck // the whole file is fine as well
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return nil
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) > numLines {
		lines = lines[len(lines)-numLines:]
	}
	for i, line := range lines {
		if len(line) > width {
			lines[i] = line[:width] + " ..."
		}
	}
	return lines
}
