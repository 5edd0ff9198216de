// Package process keeps the programs of a cluster running: start in order, wait until ready, start again after a crash, stop.
//
// The supervisor owns one Group. A component ends with the supervisor whatever happens to it (parent-death signal), so nothing is left
// behind by a kill -9 either.
package process

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// State of a component. Start and Stop are the only ways from one to another, apart from the process ending by itself.
type State string

const (
	Stopped  State = "stopped"  // not running, and nobody wants it to
	Starting State = "starting" // the process lives, its probe has not answered yet
	Running  State = "running"  // the probe has answered
	Stopping State = "stopping" // asked to end
	Crashed  State = "crashed"  // ended by itself; starts again after the backoff
)

const (
	crashBackoff = time.Second // long enough that a broken component does not eat a core
	probePeriod  = 50 * time.Millisecond
)

// Spec says how to run a component.
type Spec struct {
	Name         string
	Argv         []string // program and arguments
	Env          []string // added to the supervisor's own environment
	LogPath      string
	Ready        func(context.Context) error // nil when it serves; no function: ready as soon as it runs
	StartTimeout time.Duration
	StopGrace    time.Duration // from SIGTERM to SIGKILL
}

// Component is one program under supervision. Its methods may be called from several goroutines.
type Component struct {
	spec Spec

	mu       sync.Mutex
	state    State
	wanted   bool // restart it when it ends by itself
	process  *os.Process
	ended    chan struct{} // closed when the current process has been waited for
	exit     string        // how the last process ended
	restarts int
}

// New makes a stopped component.
func New(spec Spec) *Component {
	return &Component{spec: spec, state: Stopped}
}

// Status is a snapshot for `status`.
type Status struct {
	Name     string `json:"name"`
	State    State  `json:"state"`
	PID      int    `json:"pid,omitempty"`
	Restarts int    `json:"restarts"`
	LastExit string `json:"lastExit,omitempty"`
}

func (c *Component) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	status := Status{Name: c.spec.Name, State: c.state, Restarts: c.restarts, LastExit: c.exit}
	if c.process != nil && (c.state == Starting || c.state == Running || c.state == Stopping) {
		status.PID = c.process.Pid
	}
	return status
}

// Start runs the component and returns when its probe answers. On failure the component is stopped again and the error is a *Failure.
func (c *Component) Start(ctx context.Context) error {
	c.mu.Lock()
	if c.state == Starting || c.state == Running {
		c.mu.Unlock()
		return nil
	}
	if c.state == Stopping {
		c.mu.Unlock()
		return fmt.Errorf("%s is stopping; start it when it has stopped", c.spec.Name)
	}
	c.wanted = true
	err := c.spawn()
	ended := c.ended
	c.mu.Unlock()
	if err != nil {
		return c.fail(err)
	}
	if err := c.awaitReady(ctx, ended); err != nil {
		c.Stop(true)
		return c.fail(err)
	}
	return nil
}

// spawn needs c.mu.
func (c *Component) spawn() error {
	log, err := os.OpenFile(c.spec.LogPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	command := exec.Command(c.spec.Argv[0], c.spec.Argv[1:]...)
	command.Args = c.spec.Argv
	command.Env = append(os.Environ(), c.spec.Env...)
	command.Stdout, command.Stderr = log, log
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		c.state = Stopped
		return err
	}
	ended := make(chan struct{})
	c.process, c.ended, c.state = command.Process, ended, Starting
	go c.wait(command, ended)
	return nil
}

func (c *Component) wait(command *exec.Cmd, ended chan struct{}) {
	command.Wait() //nolint:errcheck // ProcessState says it all
	c.mu.Lock()
	defer c.mu.Unlock()
	c.exit = command.ProcessState.String()
	c.process = nil
	wasRunning := c.state == Running
	c.state = Stopped
	if c.wanted && wasRunning {
		c.state = Crashed
		time.AfterFunc(crashBackoff, c.restart)
	}
	close(ended)
}

// restart follows a crash; a component that never became ready is not restarted, Start reports it.
func (c *Component) restart() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.wanted || c.state != Crashed {
		return
	}
	c.restarts++
	if err := c.spawn(); err != nil {
		c.exit = err.Error()
		c.state = Crashed
		time.AfterFunc(crashBackoff, c.restart)
		return
	}
	// A crashed component counts as running at once, so that a second crash is followed by another restart.
	c.state = Running
}

func (c *Component) awaitReady(ctx context.Context, ended <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, c.spec.StartTimeout)
	defer cancel()
	last := fmt.Errorf("no answer yet")
	for {
		if c.spec.Ready == nil {
			last = nil
		} else {
			last = c.spec.Ready(ctx)
		}
		if last == nil {
			return c.markRunning()
		}
		select {
		case <-ended:
			c.mu.Lock()
			defer c.mu.Unlock()
			return fmt.Errorf("ended during start: %s", c.exit)
		case <-ctx.Done():
			if ctx.Err() == context.Canceled {
				return fmt.Errorf("the start was interrupted")
			}
			return fmt.Errorf("not ready after %s: %w", c.spec.StartTimeout, last)
		case <-time.After(probePeriod):
		}
	}
}

func (c *Component) markRunning() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != Starting {
		return fmt.Errorf("ended during start: %s", c.exit)
	}
	c.state = Running
	return nil
}

// Stop ends the component: SIGTERM, then SIGKILL after the grace period; SIGKILL at once if kill is set.
func (c *Component) Stop(kill bool) {
	c.mu.Lock()
	c.wanted = false
	if c.process == nil {
		c.state = Stopped // from Crashed, too
		c.mu.Unlock()
		return
	}
	c.state = Stopping
	pid, ended := c.process.Pid, c.ended
	if !kill {
		c.process.Signal(syscall.SIGTERM) //nolint:errcheck // it may have ended by itself
	}
	c.mu.Unlock()
	if !kill {
		select {
		case <-ended:
			return
		case <-time.After(c.spec.StopGrace):
		}
	}
	syscall.Kill(-pid, syscall.SIGKILL) //nolint:errcheck // the group may be gone
	<-ended
}

func (c *Component) fail(err error) error {
	return &Failure{Component: c.spec.Name, Reason: err.Error(), LogPath: c.spec.LogPath, LogTail: Tail(c.spec.LogPath, 12)}
}
