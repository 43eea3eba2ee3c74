package hosts

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	wireMTU    = 1500
	wireQueued = 4096 // packets under way in one direction; more are lost, as in any network
)

// Wire joins the second interfaces of all hosts of a network: it carries their IP packets in this process, so that it needs
// nothing of the kernel but TUN. There is no broadcast on it. Every direction between two hosts has a quality of its own.
type Wire struct {
	ends   []*os.File         // the TUN devices by host
	index  map[netip.Addr]int // host by address
	paths  [][]*path          // by sender and receiver
	carry  sync.WaitGroup
	cancel context.CancelFunc
}

// path is one direction between two hosts.
type path struct {
	mu      sync.Mutex
	line    line
	packets chan packet
}

type packet struct {
	arrival time.Time
	data    []byte
}

// openTUN makes the device wire0 in the network namespace of the calling thread.
func openTUN() (*os.File, error) {
	fd, err := unix.Open(tunDevice, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: tunDevice, Err: err}
	}
	request, err := unix.NewIfreq(wireName)
	if err == nil {
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make a TUN device: %w", err)
	}
	return os.NewFile(uintptr(fd), tunDevice), nil
}

// openWire starts to carry packets between the ends. The same seed loses the same packets.
func openWire(ends []*os.File, addresses []netip.Addr, seed uint64) *Wire {
	ctx, cancel := context.WithCancel(context.Background())
	w := &Wire{ends: ends, index: map[netip.Addr]int{}, paths: make([][]*path, len(ends)), cancel: cancel}
	for i, a := range addresses {
		w.index[a] = i
	}
	for from := range ends {
		w.paths[from] = make([]*path, len(ends))
		for to := range ends {
			if from == to {
				continue // the kernel keeps these to itself
			}
			p := &path{packets: make(chan packet, wireQueued)}
			p.line.random = rand.New(rand.NewPCG(seed, uint64(from*len(ends)+to)))
			w.paths[from][to] = p
			w.carry.Go(func() { p.deliver(ctx, ends[to]) })
		}
	}
	for from, end := range ends {
		w.carry.Go(func() { w.collect(from, end) })
	}
	return w
}

// collect takes what a host sends until its device is closed.
func (w *Wire) collect(from int, end *os.File) {
	buf := make([]byte, wireMTU)
	for {
		n, err := end.Read(buf)
		if err != nil {
			if errors.Is(err, unix.EIO) {
				continue // the device is down for now
			}
			return
		}
		if to, ok := w.index[destination(buf[:n])]; ok && to != from {
			w.paths[from][to].send(buf[:n])
		}
	}
}

// destination is where an IPv4 packet wants to go.
func destination(data []byte) netip.Addr {
	if len(data) < 20 || data[0]>>4 != 4 {
		return netip.Addr{}
	}
	return netip.AddrFrom4([4]byte(data[16:20]))
}

func (p *path) send(data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	arrival, ok := p.line.send(time.Now(), len(data))
	if !ok {
		return
	}
	select {
	case p.packets <- packet{arrival, append([]byte(nil), data...)}:
	default:
	}
}

// deliver hands each packet over when its time has come. Arrivals never go back in time, so the queue's order is right.
func (p *path) deliver(ctx context.Context, end *os.File) {
	due := time.NewTimer(0)
	defer due.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case next := <-p.packets:
			due.Reset(time.Until(next.arrival))
			select {
			case <-ctx.Done():
				return
			case <-due.C:
			}
			if !p.isCut() {
				_, _ = end.Write(next.data) // a host that does not take it loses it
			}
		}
	}
}

func (p *path) isCut() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.line.quality.Cut
}

// Shape gives every direction the same quality, from the next packet on.
func (w *Wire) Shape(q Quality) {
	w.each(func(int, int) bool { return true }, func(old *Quality) { *old = q })
}

// ShapePath gives one direction a quality.
func (w *Wire) ShapePath(from, to *Host, q Quality) {
	w.each(func(a, b int) bool { return a == from.index && b == to.index }, func(old *Quality) { *old = q })
}

// Cut lets nothing pass to or from a host, without a sign to anybody, until Heal. A packet counts as sent when this process
// has read it, which is a moment after the sender's call returned.
func (w *Wire) Cut(h *Host) { w.setCut(h, true) }

// Heal ends a Cut; the rest of the quality is as before.
func (w *Wire) Heal(h *Host) { w.setCut(h, false) }

func (w *Wire) setCut(h *Host, cut bool) {
	w.each(func(a, b int) bool { return a == h.index || b == h.index }, func(old *Quality) { old.Cut = cut })
}

func (w *Wire) each(which func(from, to int) bool, change func(*Quality)) {
	for from, row := range w.paths {
		for to, p := range row {
			if p != nil && which(from, to) {
				p.mu.Lock()
				change(&p.line.quality)
				p.mu.Unlock()
			}
		}
	}
}

func (w *Wire) close() {
	w.cancel()
	for _, end := range w.ends {
		end.Close()
	}
	w.carry.Wait()
}
