package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/host/api"
	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/mlxcel/mlxcel/host/metrics"
)

const (
	headerTimeout  = 10 * time.Second // for a request's header to arrive
	idleTimeout    = 2 * time.Minute  // for a connection's next request
	maxHeaderBytes = 64 << 10
)

// run serves until a signal, then drains; a second signal ends everything at once.
func run(ctx context.Context, cfg *Config, signals <-chan os.Signal, out, errOut io.Writer) (err error) {
	logger, closeLog, err := newLogger(cfg, errOut)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeLog()) }()
	cfg.Engine.Logger = logger
	p := &program{cfg: cfg, log: logger, failed: make(chan error, 2)}
	stop := newStop(ctx, signals)
	defer stop.wait()
	from, err := p.source(stop.gentle)
	if err != nil {
		return unlessStopped(stop, err)
	}
	defer func() { err = errors.Join(err, from.Close(ctx)) }()
	if err := p.listen(out); err != nil {
		return err
	}
	defer p.close()
	model, err := p.load(stop.gentle, from)
	switch {
	case stop.gentle.Err() != nil: // while it was loading
		return errors.Join(unlessCancelled(err), p.unload(ctx, model))
	case err != nil:
		return err
	}
	select {
	case err = <-p.failed:
	case <-stop.gentle.Done():
		p.drain(stop.hard, model)
	}
	return errors.Join(err, p.unload(ctx, model))
}

// unlessStopped leaves out what a signal caused.
func unlessStopped(s *stop, err error) error {
	if s.gentle.Err() != nil {
		return unlessCancelled(err)
	}
	return err
}

func unlessCancelled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// stop turns signals into contexts: the first signal ends gentle, the second hard.
type stop struct {
	gentle, hard context.Context
	end          context.CancelFunc
	done         chan struct{}
}

func newStop(ctx context.Context, signals <-chan os.Signal) *stop {
	hard, kill := context.WithCancel(ctx)
	gentle, drain := context.WithCancel(hard)
	s := &stop{gentle: gentle, hard: hard, end: kill, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		for _, cancel := range []context.CancelFunc{drain, kill} {
			select {
			case <-signals:
				cancel()
			case <-hard.Done():
				return
			}
		}
	}()
	return s
}

func (s *stop) wait() {
	s.end()
	<-s.done
}

func newLogger(cfg *Config, errOut io.Writer) (hclog.Logger, func() error, error) {
	out, closeLog := errOut, func() error { return nil }
	if cfg.LogFile != "" {
		f, err := os.OpenFile(cfg.LogFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return nil, nil, fmt.Errorf("--log-file: %w", err)
		}
		out, closeLog = f, f.Close
	}
	level := hclog.Info
	if cfg.Verbose {
		level = hclog.Debug
	}
	return hclog.New(&hclog.LoggerOptions{Name: "mlxcel", Level: level, Output: out, JSONFormat: cfg.LogJSON}), closeLog, nil
}

// program is the server as it runs.
type program struct {
	cfg    *Config
	log    hclog.Logger
	api    *api.Server
	model  current
	http   []*http.Server
	serve  sync.WaitGroup
	failed chan error // a listener that ended by itself
}

// listen opens the ports before the model is loaded, so that a port that is taken is told at once.
func (p *program) listen(out io.Writer) error {
	cfg := p.cfg
	m := metrics.New(cfg.Version, metrics.Source{Status: p.model.status, Busy: p.model.busy})
	p.api = api.New(api.Config{
		Version: cfg.Version, Host: cfg.Host, AllowedOrigins: cfg.AllowedOrigins, APIKeys: cfg.APIKeys, Sampling: cfg.Sampling,
		DefaultMaxTokens: cfg.DefaultMaxTokens, Timeout: cfg.Timeout, LogPrompts: cfg.LogPrompts,
		Metrics: m, Expose: cfg.Metrics && cfg.MetricsPort == 0, Logger: p.log,
	})
	addr, err := p.start(cfg.Port, "--port", p.api)
	if err != nil {
		return err
	}
	if cfg.Metrics && cfg.MetricsPort != 0 {
		if _, err := p.start(cfg.MetricsPort, "--metrics-port", p.api.MetricsOnly()); err != nil {
			p.close()
			return err
		}
	}
	p.warn(addr)
	fmt.Fprintf(out, "listening on http://%s\n", addr)
	return nil
}

func (p *program) start(port int, flag string, h http.Handler) (net.Addr, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(p.cfg.Host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("--host %s %s %d: %w", p.cfg.Host, flag, port, err)
	}
	server := &http.Server{
		Handler: h, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: p.log.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}), // faults of connections
	}
	p.http = append(p.http, server)
	p.serve.Go(func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			p.failed <- err
		}
	})
	return l.Addr(), nil
}

// warn tells what an operator should know about who can call.
func (p *program) warn(addr net.Addr) {
	if a, err := netip.ParseAddrPort(addr.String()); err == nil && !a.Addr().Unmap().IsLoopback() && len(p.cfg.APIKeys) == 0 {
		p.log.Warn("everyone who reaches this address can use the server; give --api-key-file, or leave --host out", "address", addr)
	}
	if warning := secretFileWarning(p.cfg.KeyFile); warning != "" {
		p.log.Warn(warning)
	}
}

// drain lets what runs come to its end. The end of ctx cuts it short.
func (p *program) drain(ctx context.Context, m *loadedModel) {
	p.log.Info("draining: no new requests; a second signal stops at once")
	p.api.Drain()
	if err := m.drain(ctx); err != nil {
		p.log.Warn("a stage was not told that no new work comes", "error", err)
	}
	if err := m.scheduler.Drain(ctx); err != nil && !errors.Is(err, context.Canceled) {
		p.log.Warn("draining ended early", "error", err)
	}
	for _, server := range p.http {
		if server.Shutdown(ctx) != nil {
			return // close does it ungently
		}
	}
}

// close ends the listeners and waits for their goroutines.
func (p *program) close() {
	for _, server := range p.http {
		_ = server.Close() // every connection is given up
	}
	p.serve.Wait()
}

func (p *program) unload(ctx context.Context, m *loadedModel) error {
	if m == nil {
		return nil
	}
	return m.close(ctx)
}

// current is the model that metrics ask, once there is one.
type current struct {
	mu    sync.Mutex
	model *loadedModel
}

func (c *current) set(m *loadedModel) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.model = m
}

func (c *current) get() *loadedModel {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.model
}

func (c *current) status() (batch.Status, bool) {
	m := c.get()
	if m == nil {
		return batch.Status{}, false
	}
	return m.scheduler.Status(), true
}

func (c *current) busy() []time.Duration {
	m := c.get()
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.engine == nil {
		return nil
	}
	return m.engine.Pipeline.Busy()
}
