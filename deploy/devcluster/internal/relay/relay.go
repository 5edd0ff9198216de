// Package relay joins byte streams: it carries the API of a node's private network to a port of the host.
package relay

import (
	"context"
	"io"
	"net"
	"sync"
	"time"
)

// Dial opens the other side of one connection.
type Dial func(context.Context) (net.Conn, error)

const dialTimeout = 10 * time.Second

// Serve accepts until the listener is closed.
func Serve(listener net.Listener, dial Dial) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		go join(client, dial)
	}
}

func join(client net.Conn, dial Dial) {
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
	defer cancel()
	server, err := dial(ctx)
	if err != nil {
		return // the client sees its connection closed, as with a server that is down
	}
	defer server.Close()
	var both sync.WaitGroup
	both.Add(2)
	go copyHalf(server, client, &both)
	go copyHalf(client, server, &both)
	both.Wait()
}

// copyHalf carries one direction and its end: exec and port-forward close one direction and go on reading the other.
func copyHalf(to, from net.Conn, done *sync.WaitGroup) {
	defer done.Done()
	io.Copy(to, from) //nolint:errcheck // a broken connection ends like a closed one
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		half.CloseWrite() //nolint:errcheck // it may be gone
	}
}
