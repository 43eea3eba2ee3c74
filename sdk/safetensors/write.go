package safetensors

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// alignment of the data section: readers that map the file get aligned tensors where sizes allow it.
const alignment = 8

// Entry is a tensor to be written. Write must produce exactly the bytes that Dtype and Shape ask for.
type Entry struct {
	Name  string
	Dtype string
	Shape []int64
	Write func(io.Writer) error
}

// WriteFile writes entries in order to path, through a temporary file in the same folder, so that a reader never sees
// half a file.
func WriteFile(path string, metadata map[string]string, entries []Entry) (err error) {
	header, sizes, err := encodeHeader(metadata, entries)
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.partial")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			tmp.Close()
			os.Remove(tmp.Name())
		}
	}()
	w := bufio.NewWriterSize(tmp, 1<<20)
	if _, err = w.Write(header); err != nil {
		return err
	}
	for i, e := range entries {
		c := &counter{w: w}
		if err = e.Write(c); err != nil {
			return fmt.Errorf("writing tensor %s: %w", e.Name, err)
		}
		if c.n != sizes[i] {
			return fmt.Errorf("writing tensor %s: %d bytes came, shape %v of %s wants %d", e.Name, c.n, e.Shape, e.Dtype, sizes[i])
		}
	}
	if err = w.Flush(); err != nil {
		return err
	}
	if err = tmp.Chmod(0o644); err != nil {
		return err
	}
	if err = tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

func encodeHeader(metadata map[string]string, entries []Entry) (header []byte, sizes []int64, err error) {
	type entry struct {
		Dtype   string   `json:"dtype"`
		Shape   []int64  `json:"shape"`
		Offsets [2]int64 `json:"data_offsets"`
	}
	m := map[string]any{}
	if len(metadata) > 0 {
		m["__metadata__"] = metadata
	}
	at := int64(0)
	for _, e := range entries {
		bits, ok := dtypeBits[e.Dtype]
		if !ok {
			return nil, nil, fmt.Errorf("tensor %s: unknown dtype %q", e.Name, e.Dtype)
		}
		if _, dup := m[e.Name]; dup {
			return nil, nil, fmt.Errorf("tensor %s is given twice", e.Name)
		}
		n, err := elements(e.Shape)
		if err != nil {
			return nil, nil, fmt.Errorf("tensor %s: %w", e.Name, err)
		}
		size := n * bits / 8
		m[e.Name] = entry{e.Dtype, e.Shape, [2]int64{at, at + size}}
		sizes = append(sizes, size)
		at += size
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, nil, err
	}
	for len(raw)%alignment != 0 {
		raw = append(raw, ' ')
	}
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(raw))), raw...), sizes, nil
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}
