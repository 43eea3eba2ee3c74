package transport

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// TestMonitor runs testdata/monitor: two nodes, each with a monitor of the other and a clock of its own, which starts at
// another time. Lines of input are
//
//	at MS a beats [DELAY]   a sends its next beat, which b hears DELAY ms later
//	at MS a loses           a sends its next beat, which nobody hears
//	at MS a checks          a looks at the silence
//	at MS a trip            a tells the round trip
func TestMonitor(t *testing.T) {
	type side struct {
		monitor *Monitor
		offset  time.Duration
	}
	var nodes map[string]*side
	now := func(s *side, ms time.Duration) time.Time { return time.Unix(0, 0).Add(s.offset + ms) }
	datadriven.RunTest(t, "testdata/monitor", func(t *testing.T, d *datadriven.TestData) string {
		if d.Cmd == "start" {
			nodes = map[string]*side{"a": {offset: time.Hour}, "b": {offset: time.Minute}}
			for _, s := range nodes {
				s.monitor = NewMonitor(HeartbeatConfig{}, now(s, 0))
			}
		}
		var out strings.Builder
		for line := range strings.Lines(d.Input) {
			w := strings.Fields(line)
			ms, err := strconv.Atoi(w[1])
			if err != nil {
				t.Fatal(err)
			}
			at, me, you := time.Duration(ms)*time.Millisecond, nodes[w[2]], nodes[map[string]string{"a": "b", "b": "a"}[w[2]]]
			switch w[3] {
			case "beats":
				delay := 0
				if len(w) > 4 {
					if delay, err = strconv.Atoi(w[4]); err != nil {
						t.Fatal(err)
					}
				}
				var raw [beatSize]byte
				copy(raw[:], me.monitor.Next(now(me, at)).append(nil))
				if err := you.monitor.Heard(parseBeat(&raw), now(you, at+time.Duration(delay)*time.Millisecond)); err != nil {
					fmt.Fprintln(&out, err)
				}
			case "loses":
				me.monitor.Next(now(me, at))
			case "checks":
				fmt.Fprintln(&out, me.monitor.Check(now(me, at)))
			case "trip":
				fmt.Fprintln(&out, me.monitor.RoundTrip())
			default:
				t.Fatalf("unknown command %q", w[3])
			}
		}
		return out.String()
	})
}
