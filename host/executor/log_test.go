package executor

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
)

func TestPumpLog(t *testing.T) {
	for _, c := range []struct {
		name, in, want string // want: level, message, fields
		kept           string
	}{
		{"hclog line", `{"@level":"warn","@message":"slow","@module":"llama","@timestamp":"t","ms":12,"layer":"a b"}`,
			`[WARN]  x: slow: layer="a b" ms=12`, "[WARN] llama: slow layer=a b ms=12"},
		{"unknown level", `{"@level":"loud","@message":"m"}`, "[DEBUG] x: m", "[DEBUG] m"},
		{"plain text", "from C", "[DEBUG] x: from C", "from C"},
		{"other json", `{"a":1}`, `[DEBUG] x: {"a":1}`, `{"a":1}`},
		{"broken json", `{"@level":`, `[DEBUG] x: {"@level":`, `{"@level":`},
		{"panic", "panic: boom", "[ERROR] x: panic: boom", "panic: boom"},
		{"invalid UTF-8", "a\xffb", "[DEBUG] x: a\uFFFDb", "a\uFFFDb"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			log := hclog.New(&hclog.LoggerOptions{Name: "x", Level: hclog.Trace, Output: &out, DisableTime: true})
			var ring logRing
			pumpLog(strings.NewReader(c.in+"\n"), log, &ring)
			if got := strings.TrimSpace(out.String()); got != c.want {
				t.Errorf("logged %q, want %q", got, c.want)
			}
			if got := ring.last(); len(got) != 1 || got[0] != c.kept {
				t.Errorf("kept %q, want %q", got, c.kept)
			}
		})
	}
}

func TestPanicTraceIsError(t *testing.T) {
	var out bytes.Buffer
	log := hclog.New(&hclog.LoggerOptions{Level: hclog.Error, Output: &out, DisableTime: true})
	pumpLog(strings.NewReader("before\npanic: boom\n\ngoroutine 1 [running]:\nmain.main()\n"), log, &logRing{})
	for _, want := range []string{"panic: boom", "goroutine 1 [running]:", "main.main()"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("logged %q as errors, want %q among them", out.String(), want)
		}
	}
	if strings.Contains(out.String(), "before") {
		t.Errorf("what came before the panic is an error: %q", out.String())
	}
}

func TestLogRingKeepsTheLast(t *testing.T) {
	var ring logRing
	for i := range 3 * keptLines {
		ring.add(fmt.Sprint(i))
	}
	got := ring.last()
	if len(got) != keptLines || got[0] != fmt.Sprint(2*keptLines) || got[keptLines-1] != fmt.Sprint(3*keptLines-1) {
		t.Errorf("kept %q", got)
	}
	ring.add(strings.Repeat("x", 10*maxKeptLine))
	if last := ring.last()[keptLines-1]; len(last) > maxKeptLine+len("…") {
		t.Errorf("kept a line of %d bytes, want at most %d", len(last), maxKeptLine)
	}
}

func TestEachLineCutsLongLines(t *testing.T) {
	var got []string
	eachLine(strings.NewReader("a\n"+strings.Repeat("x", 5*maxLogLine)+"\nb"), func(l string) { got = append(got, l) })
	if len(got) != 3 || got[0] != "a" || len(got[1]) > maxLogLine || got[2] != "b" {
		t.Errorf("got %d lines, the second with %d bytes", len(got), len(got[1]))
	}
}

func FuzzParseLogLine(f *testing.F) {
	f.Add(`{"@level":"warn","@message":"m","a":[1,{"b":null}]}`)
	f.Add(`{"@level":1,"@message":"m"}`)
	f.Fuzz(func(t *testing.T, line string) {
		e, ok := parseLogLine(line)
		if !ok {
			return
		}
		if len(e.fields)%2 != 0 || e.level == hclog.NoLevel {
			t.Errorf("%q: %d fields at level %v", line, len(e.fields), e.level)
		}
		if !strings.Contains(e.String(), e.message) {
			t.Errorf("%q: %q lacks the message", line, e.String())
		}
	})
}

func FuzzHandshake(f *testing.F) {
	f.Add("1|7|unix|/s|grpc|cert")
	f.Add("banner\n1|-1|tcp|x|y")
	f.Fuzz(func(t *testing.T, output string) {
		var h handshake
		hands := 0
		eachLine(strings.NewReader(output), func(line string) {
			if h.take(line) == lineHandshake {
				hands++
			}
		})
		if seen, _, printed := h.result(); hands > 1 || seen != (hands == 1) || len(printed) > 200 {
			t.Errorf("%q: %d handshakes, seen %v, printed %q", output, hands, seen, printed)
		}
	})
}

func TestHandshakeLines(t *testing.T) {
	var h handshake
	for _, c := range []struct {
		line string
		want lineKind
	}{
		{"banner of a library", lineNoise},
		{"a|1|unix|/s|grpc", lineNoise},
		{"1|x|unix|/s|grpc", lineNoise},
		{"1|2|unix", lineNoise},
		{"1|7|unix|/s|grpc|cert", lineHandshake},
		{"1|8|unix|/s|grpc|cert", lineNoise},
	} {
		if got := h.take(c.line); got != c.want {
			t.Errorf("%q is %v, want %v", c.line, got, c.want)
		}
	}
	if seen, version, printed := h.result(); !seen || version != 7 || printed != "banner of a library" {
		t.Errorf("result %v, %d, %q", seen, version, printed)
	}
}

func TestHandshakeGivesUp(t *testing.T) {
	var h handshake
	for i := range maxNoise - 1 {
		if got := h.take("noise"); got != lineNoise {
			t.Fatalf("line %d is %v", i, got)
		}
	}
	if got := h.take("noise"); got != lineTooMuch {
		t.Errorf("line %d is %v, want %v", maxNoise, got, lineTooMuch)
	}
	if got := h.take("1|7|unix|/s|grpc|cert"); got != lineNoise {
		t.Errorf("a handshake after giving up is %v", got)
	}
}
