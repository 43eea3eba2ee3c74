package stagelink

import (
	"fmt"
	"net"

	"github.com/mlxcel/mlxcel/host/pipeline"
	"github.com/mlxcel/mlxcel/host/wire"
	"github.com/mlxcel/mlxcel/sdk"
)

// receiver is the stage that a link leads to.
type receiver interface {
	pipeline.Link
	// Claim is *pipeline.Stage's.
	Claim(t pipeline.Tag, bytes int) ([]byte, pipeline.Releaser)
}

// incoming is a stage's end of the link from the stage before. A frame is read straight into the executor's shared
// memory where the stage would take it in at once, else into one of as many buffers as the stage has slots; with all of
// them in use the link is not read, so that the stage before comes to wait.
type incoming struct {
	*ending
	r     *wire.Reader
	stage receiver
	seqs  []sdk.SeqID
	free  chan *buffer
}

// buffer holds a frame that waits outside the stage's slots.
type buffer struct {
	link *incoming
	data []byte
	seqs []sdk.SeqID
}

// Release gives the buffer back; it is the Releaser of its frame.
func (b *buffer) Release() { b.link.free <- b }

// newIncoming makes an incoming link whose frames have frameBytes of data at most.
func newIncoming(conn net.Conn, stage receiver, slots int, frameBytes int64) *incoming {
	in := &incoming{
		ending: newEnding(conn), stage: stage, free: make(chan *buffer, slots),
		r: wire.NewReader(conn, wire.Limits{Meta: maxActivationMeta, Data: frameBytes}),
	}
	for range slots {
		in.free <- &buffer{link: in}
	}
	in.wait.Go(in.read)
	return in
}

func (in *incoming) read() {
	for {
		if err := in.readFrame(); err != nil {
			in.fail(err)
			return
		}
	}
}

func (in *incoming) readFrame() error {
	h, meta, err := in.r.Next()
	if err != nil {
		return err
	}
	var f pipeline.Frame
	if f.Hidden, err = hidden(h); err != nil {
		return err
	}
	if f.Tag, in.seqs, err = decodeActivation(meta, in.seqs[:0]); err != nil {
		return err
	}
	f.Seqs = in.seqs
	if f.Hidden.Data, f.Owner = in.stage.Claim(f.Tag, int(h.Data)); f.Owner == nil {
		b, err := in.buffer(int(h.Data))
		if err != nil {
			return err
		}
		b.seqs = append(b.seqs[:0], in.seqs...)
		f.Seqs, f.Hidden.Data, f.Owner = b.seqs, b.data, b
	}
	if err := in.r.ReadData(f.Hidden.Data); err != nil {
		f.Owner.Release()
		return err
	}
	in.stage.Send(f)
	return nil
}

// hidden returns the shape of the hidden rows that a header announces.
func hidden(h wire.Header) (sdk.Tensor, error) {
	dtype := sdkDtype(h.Dtype)
	if h.Kind != kindActivation || h.Rank != 2 || dtype == sdk.DtypeAuto {
		return sdk.Tensor{}, &DecodeError{Kind: h.Kind, Fault: fmt.Sprintf("%s of rank %d, where hidden rows should come", h.Dtype, h.Rank)}
	}
	return sdk.Tensor{Dtype: dtype, Rows: int(h.Dims[0]), Width: int(h.Dims[1])}, nil
}

// buffer waits for a free buffer.
func (in *incoming) buffer(bytes int) (*buffer, error) {
	select {
	case b := <-in.free:
		if cap(b.data) < bytes {
			b.data = make([]byte, bytes)
		}
		b.data = b.data[:bytes]
		return b, nil
	case <-in.done:
		return nil, in.err
	}
}
