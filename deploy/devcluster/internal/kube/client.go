// Package kube is the little of the Kubernetes API that the supervisor needs: is it ready, create this, read that.
//
// Plain HTTP and JSON on purpose: the supervisor's packages then compile in a second and link nothing of the components.
package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

// Client talks to one server of an instance, as one certificate.
type Client struct {
	base string
	http *http.Client
}

// NewClient verifies the server with caPath and shows certPath/keyPath. base is https://host:port.
func NewClient(base, caPath, certPath, keyPath string) (*Client, error) {
	ca, err := os.ReadFile(caPath)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	certificate, err := tls.LoadX509KeyPair(certPath, keyPath)
	if err != nil {
		return nil, err
	}
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{certificate}},
	}
	return &Client{base: base, http: &http.Client{Transport: transport, Timeout: 10 * time.Second}}, nil
}

// Healthy asks for path and returns nil when the answer is 200.
func (c *Client) Healthy(ctx context.Context, path string) error {
	_, err := c.do(ctx, http.MethodGet, path, nil)
	return err
}

// Get reads an object into out.
func (c *Client) Get(ctx context.Context, path string, out any) error {
	body, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	return json.Unmarshal(body, out)
}

// Create posts an object to its collection. An object that exists already is left as it is.
func (c *Client) Create(ctx context.Context, collection string, object any) error {
	_, err := c.do(ctx, http.MethodPost, collection, object)
	if status, ok := err.(*StatusError); ok && status.Code == http.StatusConflict {
		return nil
	}
	return err
}

// Delete removes an object.
func (c *Client) Delete(ctx context.Context, path string) error {
	_, err := c.do(ctx, http.MethodDelete, path, nil)
	return err
}

// StatusError is an answer that is not a success.
type StatusError struct {
	Code    int
	Request string
	Body    string
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("%s: HTTP %d: %s", e.Request, e.Code, e.Body)
}

func (c *Client) do(ctx context.Context, method, path string, object any) ([]byte, error) {
	var body io.Reader
	if object != nil {
		text, err := json.Marshal(object)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	answer, err := c.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		return nil, err
	}
	if answer.StatusCode >= 300 {
		return nil, &StatusError{Code: answer.StatusCode, Request: method + " " + path, Body: string(text[:min(len(text), 400)])}
	}
	return text, nil
}
