package supervisor

import (
	"encoding/json"
	"errors"
	"io"
	"os"
)

// Event is one line of the pipe between a starting supervisor and the `up` that waits for it.
type Event struct {
	Progress string `json:"progress,omitempty"`
	Failure  string `json:"failure,omitempty"`
	Ready    bool   `json:"ready,omitempty"`
}

// Reporter writes events. A reader that has gone (someone pressed Ctrl-C at `up`) is no reason to stop.
type Reporter struct{ pipe *os.File }

// NewReporter uses an inherited pipe; the caller passes it on in exec.Cmd.ExtraFiles.
func NewReporter(pipe *os.File) *Reporter { return &Reporter{pipe: pipe} }

func (r *Reporter) Progress(text string) { r.send(Event{Progress: text}) }
func (r *Reporter) Failure(err error)    { r.send(Event{Failure: err.Error()}) }

// Ready says that the cluster is up, and closes the pipe.
func (r *Reporter) Ready() {
	r.send(Event{Ready: true})
	r.pipe.Close()
}

func (r *Reporter) send(event Event) {
	line, err := json.Marshal(event)
	if err == nil {
		r.pipe.Write(append(line, '\n')) //nolint:errcheck // see the type
	}
}

// Follow reads events until the cluster is ready (nil) or has failed. progress is called for each line on the way.
func Follow(pipe io.Reader, progress func(string)) error {
	decoder := json.NewDecoder(pipe)
	for {
		var event Event
		if err := decoder.Decode(&event); err != nil {
			return errors.New("the supervisor ended before the cluster was ready")
		}
		switch {
		case event.Ready:
			return nil
		case event.Failure != "":
			return errors.New(event.Failure)
		default:
			progress(event.Progress)
		}
	}
}
