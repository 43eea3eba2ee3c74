package sdk

import (
	"errors"
	"strings"
	"testing"
)

// TestOutboxIsBounded pushes to a socket that nobody reads.
func TestOutboxIsBounded(t *testing.T) {
	for name, size := range map[string]int{"by frames": 8, "by bytes": maxMessage} {
		t.Run(name, func(t *testing.T) {
			a, b, err := socketPair()
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			conn, err := unixConn(a)
			if err != nil {
				t.Fatal(err)
			}
			o := newOutbox(conn, func(error) {})
			frame := make([]byte, size)
			frames := 0
			for ; err == nil && frames < 1<<20; frames++ {
				err = o.push(frame)
			}
			if !errors.Is(err, ErrExecutorGone) || !strings.Contains(err.Error(), "wait for an executor") {
				t.Errorf("after %d frames of %d bytes: error %v, want one about what waits", frames, size, err)
			}
			if least := min(maxQueuedFrames, maxQueuedBytes/size); frames < least {
				t.Errorf("%d frames of %d bytes were queued, want %d", frames, size, least)
			}
			conn.Close()
			o.close()
		})
	}
}

// TestOutboxKeepsTheOrder has the reader wait until much is queued.
func TestOutboxKeepsTheOrder(t *testing.T) {
	a, b, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	conn, err := unixConn(a)
	if err != nil {
		t.Fatal(err)
	}
	far, err := unixConn(b)
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	o := newOutbox(conn, func(err error) { t.Errorf("failed: %v", err) })
	const frames, size = 300, 4000
	for i := range frames {
		frame := make([]byte, frameHeader, frameHeader+size)
		frame[0], frame[1] = byte(size&0xff), byte(size>>8)
		for range size {
			frame = append(frame, byte(i))
		}
		if err := o.push(frame); err != nil {
			t.Fatal(err)
		}
	}
	var got []byte
	for i := range frames {
		if got, err = readStreamFrame(far, got); err != nil {
			t.Fatal(err)
		}
		if len(got) != size || got[0] != byte(i) || got[size-1] != byte(i) {
			t.Fatalf("frame %d is of %d", got[0], i)
		}
	}
	conn.Close()
	o.close()
}
