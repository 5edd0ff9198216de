// Package unixsocket opens unix sockets under paths of any length.
//
// The kernel's limit of 108 bytes counts only what is passed to it, so the socket's name is passed under an open file of its folder.
package unixsocket

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// Listen replaces a socket that a killed process has left.
func Listen(path string) (net.Listener, error) {
	os.Remove(path) //nolint:errcheck // usually there is none
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	listener, err := net.Listen("unix", short)
	if err == nil {
		listener.(*net.UnixListener).SetUnlinkOnClose(false) // the short name is not ours any more by then
	}
	return listener, err
}

func Dial(ctx context.Context, path string) (net.Conn, error) {
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	var dialer net.Dialer
	return dialer.DialContext(ctx, "unix", short)
}

func shorten(path string) (string, func(), error) {
	folder, err := syscall.Open(filepath.Dir(path), syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, fmt.Errorf("%s: %w", filepath.Dir(path), err)
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", folder, filepath.Base(path)), func() { syscall.Close(folder) }, nil
}
