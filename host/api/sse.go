package api

import (
	"bytes"
	"encoding/json"
	"net/http"
	"time"
)

// eventWriter writes server-sent events (HTML Living Standard, 9.2). The response begins with the first flush that has
// something to write.
type eventWriter struct {
	w       http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration // for one write; 0 means none
	buffer  bytes.Buffer
	begun   bool
	err     error // of encoding
}

func newEventWriter(w http.ResponseWriter, timeout time.Duration) *eventWriter {
	return &eventWriter{w: w, control: http.NewResponseController(w), timeout: timeout}
}

// event queues a value as one event.
func (out *eventWriter) event(v any) {
	data, err := json.Marshal(v)
	if err != nil {
		out.err = err
		return
	}
	out.buffer.WriteString("data: ")
	out.buffer.Write(data)
	out.buffer.WriteString("\n\n")
}

// end queues what OpenAI's clients take for the regular end of a stream.
func (out *eventWriter) end() { out.buffer.WriteString("data: [DONE]\n\n") }

// comment queues a line that clients ignore; it keeps proxies from closing a stream that is quiet.
func (out *eventWriter) comment() { out.buffer.WriteString(": keep-alive\n\n") }

// flush sends what is queued. A client that takes nothing for as long as the timeout is an error.
func (out *eventWriter) flush() error {
	if out.err != nil || out.buffer.Len() == 0 {
		return out.err
	}
	if !out.begun {
		out.begun = true
		h := out.w.Header()
		h.Set("Content-Type", "text/event-stream; charset=utf-8")
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Accel-Buffering", "no") // nginx would hold the events back
	}
	if out.timeout > 0 {
		// Not every writer has deadlines; one without is a test's.
		_ = out.control.SetWriteDeadline(time.Now().Add(out.timeout))
	}
	_, err := out.buffer.WriteTo(out.w)
	if err == nil {
		err = out.control.Flush()
	}
	return err
}

// fail ends a stream that has begun with an error event, and gives the error back for the one that has not.
func (out *eventWriter) fail(e *Error) *Error {
	if out.begun && e.Status != statusClientGone {
		out.buffer.Reset()
		out.buffer.WriteString("event: error\n")
		out.event(e.body())
		_ = out.flush() // a client that is not there any more has no use for it
	}
	return e
}
