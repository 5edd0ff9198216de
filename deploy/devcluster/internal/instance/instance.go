// Package instance knows where one cluster instance keeps its files and what was asked of it.
//
// Every other package takes an Instance instead of spelling paths. All of an instance lives in one folder, so that ending it is
// "stop the processes, remove the folder".
package instance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"syscall"
)

// Profile says what runs beside the control plane.
type Profile string

const (
	ControlPlane Profile = "control-plane" // etcd, apiserver, controller-manager, scheduler
	Simulated    Profile = "simulated"     // plus kwok and fake nodes
	Node         Profile = "node"          // plus a real kubelet, containerd, runc, CNI and CoreDNS
)

// Profiles lists the profiles in the order in which they grow.
var Profiles = []Profile{ControlPlane, Simulated, Node}

// Settings is what `up` was asked for; it is written into the folder so that every later verb knows it.
type Settings struct {
	Profile       Profile  `json:"profile"`
	BinDir        string   `json:"binDir"` // absolute; where kwok, containerd, runc and the CNI plugins are
	Images        []string `json:"images,omitempty"`
	NumNodes      int      `json:"numNodes"` // simulated nodes
	GPUsPerNode   int      `json:"gpusPerNode"`
	FeatureGates  string   `json:"featureGates,omitempty"`
	RuntimeConfig string   `json:"runtimeConfig,omitempty"`
	Ports         Ports    `json:"ports"`
	OwnerPID      int      `json:"ownerPID,omitempty"` // the instance ends with this process; 0: with nobody
	UserMode      bool     `json:"userMode"`           // the node runs in a user namespace of an ordinary user
	HasNft        bool     `json:"hasNft"`
}

// Ports are TCP ports on the loopback interface. API is the one that clients of the host use, in every profile.
type Ports struct {
	API               int `json:"api"`
	APIInside         int `json:"apiInside"` // where the API server listens; differs from API only where a relay is between
	Etcd              int `json:"etcd"`
	EtcdPeer          int `json:"etcdPeer"`
	ControllerManager int `json:"controllerManager"`
	Scheduler         int `json:"scheduler"`
}

// Instance is one cluster, running or not. Paths are absolute.
type Instance struct {
	Name string
	Root string
}

var namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

// New checks the name and makes the root absolute. It touches no file.
func New(root, name string) (Instance, error) {
	if !namePattern.MatchString(name) {
		return Instance{}, fmt.Errorf("--name %q: must be 1 to 40 lower-case letters, digits and dashes, dashes not at the ends", name)
	}
	absolute, err := filepath.Abs(root)
	if err != nil {
		return Instance{}, fmt.Errorf("--root %q: %w", root, err)
	}
	return Instance{Name: name, Root: absolute}, nil
}

// List names the instances that have a folder under root.
func List(root string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, entry := range entries {
		if entry.IsDir() && namePattern.MatchString(entry.Name()) {
			names = append(names, entry.Name())
		}
	}
	sort.Strings(names)
	return names, err
}

func (i Instance) Dir() string { return filepath.Join(i.Root, i.Name) }
func (i Instance) Path(part ...string) string {
	return filepath.Join(append([]string{i.Dir()}, part...)...)
}
func (i Instance) Certs(file string) string { return i.Path("certs", file) }
func (i Instance) Log(component string) string {
	return i.Path("logs", component+".log")
}
func (i Instance) Kubeconfig() string    { return i.Path("kubeconfig") }
func (i Instance) ControlSocket() string { return i.Path("control.sock") }

// lockPath is beside the folder, not in it: a lock must outlive the removal of what it guards.
func (i Instance) lockPath() string { return filepath.Join(i.Root, "."+i.Name+".lock") }

// Exists tells whether the instance has a folder, running or left over.
func (i Instance) Exists() bool {
	_, err := os.Stat(i.Dir())
	return err == nil
}

// Create makes the folder, readable by its owner alone: it holds keys.
func (i Instance) Create(settings Settings) error {
	for _, sub := range []string{"certs", "logs", "config", "data"} {
		if err := os.MkdirAll(i.Path(sub), 0o700); err != nil {
			return err
		}
	}
	return i.WriteSettings(settings)
}

func (i Instance) WriteSettings(settings Settings) error {
	text, err := json.MarshalIndent(settings, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(i.Path("settings.json"), append(text, '\n'), 0o600)
}

func (i Instance) ReadSettings() (Settings, error) {
	var settings Settings
	text, err := os.ReadFile(i.Path("settings.json"))
	if err != nil {
		return settings, err
	}
	return settings, json.Unmarshal(text, &settings)
}

// ErrLocked says that a supervisor holds the instance.
var ErrLocked = errors.New("a supervisor is running for this instance")

// Lock takes the instance for the calling process and those that inherit the file; the kernel lets go when the last of them ends,
// however it ends. ErrLocked when another holds it.
func (i Instance) Lock() (*os.File, error) {
	if err := os.MkdirAll(i.Root, 0o755); err != nil {
		return nil, err
	}
	for {
		file, err := os.OpenFile(i.lockPath(), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			file.Close()
			if errors.Is(err, syscall.EWOULDBLOCK) {
				return nil, ErrLocked
			}
			return nil, err
		}
		if i.isCurrent(file) {
			return file, nil
		}
		file.Close() // whoever held it has removed it between our two steps: this lock guards nothing
	}
}

func (i Instance) isCurrent(lock *os.File) bool {
	held, err := lock.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(i.lockPath())
	return err == nil && os.SameFile(held, named)
}

// IsRunning tells whether a supervisor holds the instance.
func (i Instance) IsRunning() bool {
	file, err := i.Lock()
	if err == nil {
		file.Close()
	}
	return errors.Is(err, ErrLocked)
}

// Remove deletes everything that the instance ever wrote, but not its lock. The caller holds the lock.
func (i Instance) Remove() error { return os.RemoveAll(i.Dir()) }

// Unlock gives the lock back and removes its file.
func (i Instance) Unlock(lock *os.File) {
	os.Remove(i.lockPath()) //nolint:errcheck // an empty file that stays is harmless
	lock.Close()
}
