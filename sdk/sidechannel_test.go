package sdk

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// pairOfEnds opens a side channel and serves its far end.
func pairOfEnds(t *testing.T) (*SideChannel, *descriptors) {
	t.Helper()
	c, err := NewSideChannel()
	if err != nil {
		t.Fatal(err)
	}
	d, err := newDescriptors(c.far)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.conn.Close()
		d.close()
	})
	return c, d
}

func temporary(t *testing.T, text string) *os.File {
	t.Helper()
	f, err := openAnonymous()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestDescriptorsAreHandedOver(t *testing.T) {
	c, d := pairOfEnds(t)
	first, err := c.Hand(PurposeState, temporary(t, "first"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.Hand("memory", temporary(t, "second"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct {
		number        uint32
		purpose, text string
	}{{second, "memory", "second"}, {first, PurposeState, "first"}} { // in any order
		f, err := d.take(t.Context(), want.number, want.purpose)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		text := make([]byte, 10)
		n, _ := f.ReadAt(text, 0)
		if string(text[:n]) != want.text {
			t.Errorf("descriptor %d holds %q, want %q", want.number, text[:n], want.text)
		}
		if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("descriptor %d is inherited by children: %x, %v", want.number, flags, err)
		}
	}
}

func TestDescriptorsAreRefused(t *testing.T) {
	c, d := pairOfEnds(t)
	number, err := c.Hand(PurposeState, temporary(t, ""))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.take(t.Context(), number, PurposeSteps); err == nil || !strings.Contains(err.Error(), "for state, not for steps") {
		t.Errorf("another purpose: %v", err)
	}
	f, err := d.take(t.Context(), number, PurposeState)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := d.take(t.Context(), number, PurposeState); err == nil || !strings.Contains(err.Error(), "used before") {
		t.Errorf("a second use: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.take(ended, number+1, PurposeState); CodeOf(err) != CodeCanceled {
		t.Errorf("one that never comes: %v", err)
	}
	for _, purpose := range []string{"", strings.Repeat("x", maxPurpose+1)} {
		if _, err := c.Hand(purpose, temporary(t, "")); CodeOf(err) != CodeInvalid {
			t.Errorf("purpose %q: %v", purpose, err)
		}
	}
	if _, err := (*descriptors)(nil).take(t.Context(), 1, PurposeState); err == nil || !strings.Contains(err.Error(), EnvChannelFD) {
		t.Errorf("without a channel: %v", err)
	}
}

// TestHandNeverWaits hands over more than anybody takes.
func TestHandNeverWaits(t *testing.T) {
	c, err := NewSideChannel()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f := temporary(t, "")
	for range 1 << 20 {
		if _, err = c.Hand(PurposeState, f); err != nil {
			break
		}
	}
	if err == nil {
		t.Error("no error, though nobody takes what is handed over")
	}
}

// TestUnusedDescriptorsAreBounded ends the channel of a host that hands over without end.
func TestUnusedDescriptorsAreBounded(t *testing.T) {
	c, d := pairOfEnds(t)
	f := temporary(t, "")
	for range maxDescriptors + 1 {
		if _, err := c.Hand(PurposeState, f); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := d.take(t.Context(), maxDescriptors+2, PurposeState); err == nil || !strings.Contains(err.Error(), "held unused") {
		t.Errorf("error %v, want one about those held", err)
	}
}

func TestSideChannelOfADeadExecutor(t *testing.T) {
	c, err := NewSideChannel()
	if err != nil {
		t.Fatal(err)
	}
	defer c.conn.Close()
	c.far.Close()
	if _, err := c.Hand(PurposeState, temporary(t, "")); !errors.Is(err, ErrExecutorGone) {
		t.Errorf("error %v, want ErrExecutorGone", err)
	}
}
