package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/mlxcel/mlxcel/host/securelink"
)

// DefaultSettle is how long a search goes on when all are there, for their other addresses.
const DefaultSettle = 200 * time.Millisecond

// SearchConfig is what a coordinator looks for.
type SearchConfig struct {
	Secret   securelink.Secret // required
	Cluster  string            // name
	Port     int               // --cluster-discovery-port, UDP; default DefaultPort
	Want     int               // nodes
	Settle   time.Duration     // default DefaultSettle
	Log      hclog.Logger      // default none
	OnChange func(Report)      // called from Find when nodes or kinds of refusals come or go; may be nil

	Listen func(ctx context.Context, port int) (net.PacketConn, error) // default UDP on every address, shared with other coordinators
	Now    func() time.Time                                            // default time.Now
}

// Search listens for beacons. It may be run again and again, and knows replayed beacons of earlier runs.
type Search struct {
	cfg     SearchConfig
	tracker *Tracker
}

// NewSearch checks the configuration.
func NewSearch(cfg SearchConfig) (*Search, error) {
	if cfg.Port == 0 {
		cfg.Port = DefaultPort
	}
	if cfg.Settle == 0 {
		cfg.Settle = DefaultSettle
	}
	if cfg.Log == nil {
		cfg.Log = hclog.NewNullLogger()
	}
	if cfg.Listen == nil {
		cfg.Listen = listen
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	tracker, err := NewTracker(TrackerConfig{Secret: cfg.Secret, Cluster: cfg.Cluster})
	if err != nil {
		return nil, err
	}
	return &Search{cfg, tracker}, nil
}

// datagram is what came, and from where.
type datagram struct {
	from netip.AddrPort
	data []byte
}

// Find listens until as many nodes as wanted are there at once, and returns them. Where ctx ends first, the error is a
// *NotFoundError; the report is returned in any case.
func (s *Search) Find(ctx context.Context) (Report, error) {
	conn, err := s.cfg.Listen(ctx, s.cfg.Port)
	if err != nil {
		return Report{Want: s.cfg.Want}, fmt.Errorf("listen for beacons on UDP port %d: %w: give another --cluster-discovery-port to every node, or use --cluster-discovery=static", s.cfg.Port, err)
	}
	incoming := make(chan datagram)
	stop := make(chan struct{})
	failed := make(chan error, 1)
	go func() { failed <- receive(conn, incoming, stop) }()
	report, err := s.collect(ctx, incoming, failed)
	close(stop)
	closing := conn.Close()
	for range incoming { // until the reader has ended
	}
	return report, errors.Join(err, closing)
}

// receive hands on what comes until the socket is closed.
func receive(conn net.PacketConn, incoming chan<- datagram, stop <-chan struct{}) error {
	defer close(incoming)
	buf := make([]byte, BeaconSize+1) // one more, so that a longer one is seen to be
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return err
		}
		udp, ok := from.(*net.UDPAddr)
		if !ok {
			continue
		}
		select {
		case incoming <- datagram{udp.AddrPort(), append([]byte(nil), buf[:n]...)}:
		case <-stop:
			return nil
		}
	}
}

// collect feeds the tracker until it is satisfied.
func (s *Search) collect(ctx context.Context, incoming <-chan datagram, failed <-chan error) (Report, error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var settled <-chan time.Time
	told := ""
	look := true // what was refused is told each second only, however much comes
	var report Report
	for {
		if look {
			report = s.tracker.Report(s.cfg.Now(), s.cfg.Want)
			told = s.tell(report, told)
		}
		switch {
		case !report.Complete():
			settled = nil
		case settled == nil:
			settled = time.After(s.cfg.Settle)
		}
		look = true
		select {
		case d, ok := <-incoming:
			if !ok {
				return report, fmt.Errorf("listen for beacons on UDP port %d: %w", s.cfg.Port, <-failed)
			}
			outcome, _ := s.tracker.Observe(s.cfg.Now(), d.from, d.data)
			look = outcome != Ignored && outcome != Heard
		case <-settled:
			return s.tracker.Report(s.cfg.Now(), s.cfg.Want), nil
		case <-tick.C: // nodes expire
		case <-ctx.Done():
			report = s.tracker.Report(s.cfg.Now(), s.cfg.Want)
			return report, &NotFoundError{report, s.cfg.Port, ctx.Err()}
		}
	}
}

// tell passes a report on where its kinds of entries differ from those that were told last.
func (s *Search) tell(report Report, told string) string {
	kinds := report.kinds()
	if kinds == told {
		return told
	}
	s.cfg.Log.Info("discovery", "report", report.String())
	if s.cfg.OnChange != nil {
		s.cfg.OnChange(report)
	}
	return kinds
}

func listen(ctx context.Context, port int) (net.PacketConn, error) {
	lc := net.ListenConfig{Control: shared}
	return lc.ListenPacket(ctx, "udp4", net.JoinHostPort("0.0.0.0", strconv.Itoa(port)))
}
