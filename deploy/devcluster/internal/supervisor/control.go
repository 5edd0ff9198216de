package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"

	"zerotrain.dev/devcluster/internal/instance"
	"zerotrain.dev/devcluster/internal/process"
	"zerotrain.dev/devcluster/internal/unixsocket"
)

// The other verbs talk to the supervisor over a unix socket in the instance's folder, whose permissions are those of the folder: its
// owner alone. HTTP, so that one can ask it with curl.

// handler serves the socket.
func (s *Supervisor) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		json.NewEncoder(w).Encode(s.group.Status()) //nolint:errcheck // the asker has gone
	})
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) {
		if !s.ready.Load() {
			http.Error(w, "starting", http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("POST /stop", s.onComponent(func(_ context.Context, component *process.Component, kill bool) error {
		component.Stop(kill)
		return nil
	}))
	mux.HandleFunc("POST /start", s.onComponent(func(_ context.Context, component *process.Component, _ bool) error {
		// Not the request's context: a component must not be given up because the asker lost patience.
		return component.Start(context.Background())
	}))
	mux.HandleFunc("POST /load-image", func(w http.ResponseWriter, r *http.Request) {
		answer(w, s.loadImage(r.FormValue("path")))
	})
	mux.HandleFunc("POST /shutdown", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, nil)
		s.requestShutdown()
	})
	return mux
}

func (s *Supervisor) onComponent(do func(context.Context, *process.Component, bool) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		component, err := s.group.Find(r.FormValue("component"))
		if err == nil {
			err = do(r.Context(), component, r.FormValue("kill") == "true")
		}
		answer(w, err)
	}
}

func answer(w http.ResponseWriter, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// Control asks the supervisor of an instance.
type Control struct{ http *http.Client }

// NewControl does not connect yet.
func NewControl(inst instance.Instance) Control {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return unixsocket.Dial(ctx, inst.ControlSocket())
	}
	return Control{http: &http.Client{Transport: &http.Transport{DialContext: dial}}}
}

func (c Control) Status() ([]process.Status, error) {
	var all []process.Status
	body, err := c.do(http.MethodGet, "/status", nil)
	if err == nil {
		err = json.Unmarshal(body, &all)
	}
	return all, err
}

// Ready is nil once the whole cluster has come up.
func (c Control) Ready() error {
	_, err := c.do(http.MethodGet, "/ready", nil)
	return err
}

func (c Control) StopComponent(name string, kill bool) error {
	_, err := c.do(http.MethodPost, "/stop", url.Values{"component": {name}, "kill": {fmt.Sprint(kill)}})
	return err
}

func (c Control) StartComponent(name string) error {
	_, err := c.do(http.MethodPost, "/start", url.Values{"component": {name}})
	return err
}

// LoadImage imports a docker-archive; path is absolute.
func (c Control) LoadImage(path string) error {
	_, err := c.do(http.MethodPost, "/load-image", url.Values{"path": {path}})
	return err
}

func (c Control) Shutdown() error {
	_, err := c.do(http.MethodPost, "/shutdown", nil)
	return err
}

func (c Control) do(method, path string, form url.Values) ([]byte, error) {
	request, err := http.NewRequest(method, "http://devcluster"+path, strings.NewReader(form.Encode()))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	response, err := c.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = errors.New(strings.TrimSpace(string(body)))
	}
	return body, err
}
