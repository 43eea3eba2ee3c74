package stagelink

import (
	"fmt"
	"net"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/wire"
)

// outgoing is a stage's end of the link to the next stage. A goroutine writes, so that sending one micro-batch overlaps
// computing the next.
type outgoing struct {
	*ending
	queue    *queue[pipeline.Frame]
	w        *wire.Writer
	deadline writeDeadline
}

var _ pipeline.Link = (*outgoing)(nil)

// newOutgoing makes an outgoing link. Every frame lies in a slot of the stage until it is written, so slots bounds how
// many wait.
func newOutgoing(conn net.Conn, slots int, frameBytes int64, cfg Config) *outgoing {
	cfg = cfg.withDefaults()
	o := &outgoing{
		ending: newEnding(conn), queue: newQueue[pipeline.Frame](slots),
		w:        wire.NewWriter(conn, wire.Limits{Meta: maxActivationMeta, Data: frameBytes}),
		deadline: writeDeadline{conn: conn, timeout: cfg.FrameTimeout},
	}
	o.wait.Go(o.write)
	o.wait.Go(o.listen)
	o.wait.Go(func() {
		<-o.done
		o.queue.close()
	})
	return o
}

// maxActivationMeta holds the sequences of a micro-batch.
const maxActivationMeta = 1 << 20

// Send is Link's.
func (o *outgoing) Send(f pipeline.Frame) {
	err := o.queue.push(f)
	if err == nil {
		return
	}
	f.Owner.Release()
	if err != errClosed {
		o.fail(err)
	}
}

// write sends frames and gives their bytes back, also where the link has ended.
func (o *outgoing) write() {
	var frames []pipeline.Frame
	for more := true; more; {
		frames, more = o.queue.drain(frames)
		for i := range frames {
			if err := o.writeFrame(&frames[i]); err != nil {
				o.fail(err)
			}
			frames[i].Owner.Release()
		}
	}
}

func (o *outgoing) writeFrame(f *pipeline.Frame) error {
	select {
	case <-o.done:
		return o.err
	default:
	}
	if err := o.deadline.renew(); err != nil {
		return err
	}
	h := wire.Header{Kind: kindActivation}
	h.SetMatrix(wireDtypes[f.Hidden.Dtype], uint32(f.Hidden.Rows), uint32(f.Hidden.Width))
	return o.w.Write(h, appendActivation(o.w.Meta(), f.Tag, f.Seqs), f.Hidden.Data)
}

// listen waits for the end of the link: nothing else comes back on it.
func (o *outgoing) listen() {
	var b [1]byte
	_, err := o.conn.Read(b[:])
	if err == nil {
		err = fmt.Errorf("byte %#x came back on it, where nothing should", b[0])
	}
	o.fail(err)
}
