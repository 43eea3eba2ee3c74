package sdk_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/mlxcel/mlxcel/sdk"
)

// The test's own binary plays the processes: an executor where a host started it, and a host where envHost is set.
const (
	envHost   = "SDK_TEST_HOST"   // path of the FIFO that the host's executor is to hold open
	envFIFO   = "SDK_TEST_FIFO"   // the same for the executor
	envMisuse = "SDK_TEST_MISUSE" // what the executor is to do wrong
)

func TestMain(m *testing.M) {
	switch {
	case sdk.Launched():
		sdk.Serve(sdk.ServeOptions{New: newProcessEcho})
	case os.Getenv(envHost) != "":
		playHost(os.Getenv(envHost))
	default:
		os.Exit(m.Run())
	}
}

// processEcho is the executor of these tests.
func newProcessEcho(logger hclog.Logger) sdk.Executor {
	holdFIFO(os.Getenv(envFIFO))
	e := &sdk.Echo{Width: 1}
	switch os.Getenv(envMisuse) {
	case "chatter":
		return &chatter{Echo: e, logger: logger}
	case "panic":
		e.OnStep = func(context.Context, *sdk.Step) error { panic("lost my mind") }
	case "hang":
		e.OnStep = func(context.Context, *sdk.Step) error { select {} }
	case "spin":
		go func() {
			runtime.LockOSThread()
			for n := uint64(1); n != 0; n = 3*n | 1 { // deep in a computation that never ends
			}
		}()
	case "wide":
		return &wide{Echo: e}
	case "head":
		e.Head, e.Capabilities = 152_000, []string{sdk.CapabilityMasks}
		return &picker{Echo: e}
	}
	return e
}

// wide takes its boundary's width from the region, for the benchmark.
type wide struct{ *sdk.Echo }

func (w *wide) Load(ctx context.Context, req sdk.LoadRequest, progress func(sdk.LoadProgress)) (*sdk.LoadReport, error) {
	w.Width = req.Region.InBytes / 4
	return w.Echo.Load(ctx, req, progress)
}

// picker plays a head that looks at every byte of the masks and takes the same token always.
type picker struct {
	*sdk.Echo
	allowed int
}

func (p *picker) Step(_ context.Context, s *sdk.Step) (*sdk.StepResult, error) {
	r := &sdk.StepResult{ID: s.ID}
	for i := range s.Seqs {
		p.allowed += bytes.Count(s.Seqs[i].Allowed, []byte{0xa5})
		r.Seqs = append(r.Seqs, sdk.SeqResult{Seq: s.Seqs[i].Seq, Token: 1})
	}
	return r, nil
}

// chatter writes to everything that it has.
type chatter struct {
	*sdk.Echo
	logger hclog.Logger
}

func (c *chatter) Describe(ctx context.Context) (*sdk.Description, error) {
	fmt.Println("on stdout")
	fmt.Fprintln(os.Stderr, "on stderr")
	if _, err := syscall.Write(2, []byte("on descriptor 2\n")); err != nil {
		return nil, err
	}
	c.logger.Warn("in the log", "answer", 42)
	return c.Echo.Describe(ctx)
}

// holdFIFO opens the FIFO for writing until the process ends.
func holdFIFO(path string) {
	if path == "" {
		return
	}
	fd, err := syscall.Open(path, syscall.O_WRONLY, 0)
	if err != nil {
		panic(err)
	}
	if _, err := syscall.Write(fd, []byte("up\n")); err != nil {
		panic(err)
	}
}

// playHost starts an executor and then does nothing more than live.
func playHost(fifo string) {
	p, err := launch(nil, envFIFO+"="+fifo, envMisuse+"="+os.Getenv(envMisuse))
	if err != nil {
		panic(err)
	}
	if err := p.client.Ping(context.Background()); err != nil {
		panic(err)
	}
	fmt.Println("ready")
	select {}
}

// process is an executor process, as a host has it.
type process struct {
	client   *sdk.Client
	plugin   *plugin.Client
	cmd      *exec.Cmd
	region   *sdk.Region
	lifeline *sdk.Lifeline
	channel  *sdk.SideChannel
}

func launch(configure func(*plugin.ClientConfig), env ...string) (*process, error) {
	region, err := sdk.NewRegion()
	if err != nil {
		return nil, err
	}
	lifeline, err := sdk.NewLifeline()
	if err != nil {
		return nil, err
	}
	channel, err := sdk.NewSideChannel()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(self), region: region, lifeline: lifeline, channel: channel}
	p.cmd.Env = append(os.Environ(), append(env, envHost+"=", "GORACE=atexit_sleep_ms=0")...)
	sdk.Inherit(p.cmd, region, lifeline, channel)
	config := sdk.ClientConfig(p.cmd, region, channel, hclog.NewNullLogger())
	if configure != nil {
		configure(config)
	}
	p.plugin = plugin.NewClient(config)
	p.client, err = sdk.Dispense(p.plugin)
	if err != nil {
		p.stop()
	}
	return p, err
}

func (p *process) stop() {
	p.plugin.Kill()
	p.lifeline.Close()
	p.region.Close()
	p.channel.Close()
}

func start(t testing.TB, configure func(*plugin.ClientConfig), env ...string) *process {
	t.Helper()
	p, err := launch(configure, env...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.stop)
	return p
}

func (p *process) load(t testing.TB, layout sdk.RegionLayout) *sdk.StepStream {
	t.Helper()
	if _, err := p.client.Load(t.Context(), sdk.LoadRequest{Layers: sdk.LayerRange{Start: 1, End: 2}, HasHead: layout.OutBytes == 0, Region: layout}, nil); err != nil {
		t.Fatal(err)
	}
	s, err := p.client.OpenSteps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// step makes a step that carries a whole slot as one row.
func (p *process) step(id uint64, slot int) *sdk.Step {
	in := p.region.In(slot)
	return &sdk.Step{
		ID:     id,
		Slot:   slot,
		Seqs:   []sdk.SeqStep{{Seq: 1, Rows: 1}},
		Hidden: sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: 1, Width: len(in) / 4, Data: in},
	}
}

var one = sdk.RegionLayout{Slots: 2, InBytes: 4, OutBytes: 4}

func TestProcess(t *testing.T) {
	p := start(t, nil)
	if err := p.client.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	d, err := p.client.Describe(t.Context())
	if err != nil || d.Name != "echo" {
		t.Fatalf("description %+v, %v", d, err)
	}
	s := p.load(t, one)
	step := p.step(1, 1)
	binary.LittleEndian.PutUint32(step.Hidden.Data, 77)
	answer, err := s.Send(step)
	if err != nil {
		t.Fatal(err)
	}
	r, err := answer.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := binary.LittleEndian.Uint32(r.Hidden.Data); got != 77 {
		t.Errorf("the executor gave back %d, want 77", got)
	}
}

func TestProcessWithoutRegion(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := plugin.NewClient(sdk.ClientConfig(exec.Command(self), nil, nil, hclog.NewNullLogger()))
	defer c.Kill()
	client, err := sdk.Dispense(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Describe(t.Context()); err != nil {
		t.Errorf("describe: %v", err)
	}
	if _, err := client.Load(t.Context(), sdk.LoadRequest{Layers: sdk.LayerRange{End: 1}, Region: one}, nil); sdk.CodeOf(err) != sdk.CodeInvalid || !strings.Contains(err.Error(), "region") {
		t.Errorf("load: %v, want an error about the region", err)
	}
}

// TestProcessWithABadDescriptor tells the executor of a descriptor that it does not have.
func TestProcessWithABadDescriptor(t *testing.T) {
	for _, value := range []string{"99", "none", "-1"} {
		t.Run(value, func(t *testing.T) {
			var log lines
			p, err := launch(func(c *plugin.ClientConfig) {
				logTo(&log)(c)
				c.Cmd.Env = append(c.Cmd.Env, sdk.EnvRegionFD+"="+value)
			})
			if err == nil {
				p.stop()
				t.Fatal("the executor started")
			}
			log.find(t, sdk.EnvRegionFD) // the log says why
		})
	}
}

func TestAnotherContractVersion(t *testing.T) {
	_, err := launch(func(c *plugin.ClientConfig) {
		c.VersionedPlugins = map[int]plugin.PluginSet{sdk.ContractVersion + 1: c.VersionedPlugins[sdk.ContractVersion]}
	})
	if err == nil || !strings.Contains(strings.ToLower(err.Error()), "version") {
		t.Errorf("error %v, want one about the version", err)
	}
}

// lines collects log output.
type lines struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(p)
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
	return len(p), nil
}

// find waits until a line has the text and returns it.
func (l *lines) find(t *testing.T, text string) string {
	t.Helper()
	for {
		l.mu.Lock()
		for line := range strings.Lines(l.buf.String()) {
			if strings.Contains(line, text) && strings.HasSuffix(line, "\n") {
				l.mu.Unlock()
				return line
			}
		}
		if l.more == nil {
			l.more = make(chan struct{})
		}
		more := l.more
		l.mu.Unlock()
		select {
		case <-more:
		case <-t.Context().Done():
			return ""
		}
	}
}

func logTo(l *lines) func(*plugin.ClientConfig) {
	return func(c *plugin.ClientConfig) {
		c.Logger = hclog.New(&hclog.LoggerOptions{Level: hclog.Debug, Output: l, JSONFormat: true})
	}
}

// TestOutput has the executor write to stdout, stderr, descriptor 2 and its log, while calls go on.
func TestOutput(t *testing.T) {
	var log, stdout, stderr lines
	p := start(t, func(c *plugin.ClientConfig) {
		logTo(&log)(c)
		c.SyncStdout, c.SyncStderr = &stdout, &stderr
	}, envMisuse+"=chatter")
	if _, err := p.client.Describe(t.Context()); err != nil {
		t.Fatal(err)
	}
	stdout.find(t, "on stdout")
	stderr.find(t, "on stderr")
	log.find(t, "on descriptor 2")
	if line := log.find(t, "in the log"); !strings.Contains(line, `"@level":"warn"`) || !strings.Contains(line, `"answer":42`) {
		t.Errorf("the log line %q lost its level or its field", line)
	}
	if err := p.client.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestPanicEndsTheProcess(t *testing.T) {
	var log lines
	p := start(t, logTo(&log), envMisuse+"=panic")
	s := p.load(t, one)
	answer, err := s.Send(p.step(1, 0))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := answer.Wait(t.Context()); !errors.Is(err, sdk.ErrExecutorGone) {
		t.Errorf("error %v, want ErrExecutorGone", err)
	}
	line := log.find(t, "executor panicked")
	for _, want := range []string{`"@level":"error"`, `"operation":"step"`, "lost my mind", "process_test.go"} {
		if !strings.Contains(line, want) {
			t.Errorf("the log line %q lacks %q", line, want)
		}
	}
	if _, err := p.client.Describe(t.Context()); !errors.Is(err, sdk.ErrExecutorGone) {
		t.Errorf("a call of a dead executor: %v, want ErrExecutorGone", err)
	}
}

// TestKilledExecutor kills the process with work in flight.
func TestKilledExecutor(t *testing.T) {
	p := start(t, nil, envMisuse+"=hang")
	s := p.load(t, one)
	var answers []*sdk.Pending
	for slot := range one.Slots {
		a, err := s.Send(p.step(uint64(slot), slot))
		if err != nil {
			t.Fatal(err)
		}
		answers = append(answers, a)
	}
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for _, a := range answers {
		if _, err := a.Wait(t.Context()); !errors.Is(err, sdk.ErrExecutorGone) {
			t.Errorf("error %v, want ErrExecutorGone", err)
		}
	}
	if _, err := s.Send(sdk.Release{}); !errors.Is(err, sdk.ErrExecutorGone) {
		t.Errorf("a send to a dead executor: %v, want ErrExecutorGone", err)
	}
}

// TestSendNeverWaits fills the queues of an executor that stands still.
func TestSendNeverWaits(t *testing.T) {
	p := start(t, nil)
	s := p.load(t, one)
	suspend(t, p)
	var answers []*sdk.Pending
	var sent error
	for sent == nil {
		var a *sdk.Pending
		if a, sent = s.Send(sdk.Release{Seq: 1}); sent == nil {
			answers = append(answers, a)
		}
	}
	if !errors.Is(sent, sdk.ErrExecutorGone) || !strings.Contains(sent.Error(), "wait for an executor") {
		t.Errorf("error %v, want one about what waits", sent)
	}
	for _, a := range answers {
		if _, err := a.Wait(t.Context()); !errors.Is(err, sdk.ErrExecutorGone) {
			t.Errorf("an operation that was sent: %v, want ErrExecutorGone", err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// suspend stops the process, which goes on to exist without answering, and ends it with the test.
func suspend(t *testing.T, p *process) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus // the signal takes its time; this waits for it
	if _, err := syscall.Wait4(p.cmd.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("the process did not stop: %v, %v", status, err)
	}
	t.Cleanup(func() {
		if err := p.cmd.Process.Kill(); err != nil {
			t.Error(err)
		}
	})
}

// TestPingHasADeadline stops the process, which goes on to exist without answering.
func TestPingHasADeadline(t *testing.T) {
	p := start(t, nil)
	suspend(t, p)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.client.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the deadline's", err)
	}
}

// TestHostDies kills a host with SIGKILL; its executor must end too, whatever it is at.
func TestHostDies(t *testing.T) {
	for _, misuse := range []string{"", "spin"} {
		t.Run("executor "+misuse, func(t *testing.T) {
			fifo := filepath.Join(t.TempDir(), "held")
			if err := syscall.Mkfifo(fifo, 0o600); err != nil {
				t.Fatal(err)
			}
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			host := exec.Command(self)
			host.Env = append(os.Environ(), envHost+"="+fifo, envMisuse+"="+misuse)
			host.Stderr = os.Stderr
			out, err := host.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := host.Start(); err != nil {
				t.Fatal(err)
			}
			held, err := os.Open(fifo) // waits for the executor
			if err != nil {
				t.Fatal(err)
			}
			defer held.Close()
			if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
				t.Fatalf("the host says %q, %v", line, err)
			}
			if err := host.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := host.Wait(); err == nil {
				t.Error("the host ended well, though it was killed")
			}
			// The end of the FIFO is the end of the only process that holds it.
			if text, err := io.ReadAll(held); err != nil || string(text) != "up\n" {
				t.Errorf("the executor wrote %q, %v", text, err)
			}
		})
	}
}

// BenchmarkStepRoundTrip measures a step to another process and back, the host writes its rows into the
// slot, the executor copies them to its output, the host reads them out.
func BenchmarkStepRoundTrip(b *testing.B) {
	for _, size := range []int{4 << 10, 4 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			p := start(b, nil, envMisuse+"=wide")
			s := p.load(b, sdk.RegionLayout{Slots: 1, InBytes: size, OutBytes: size})
			rows, back := bytes.Repeat([]byte{7}, size), make([]byte, size)
			var took []time.Duration
			b.SetBytes(int64(2 * size))
			for n := 0; b.Loop(); n++ {
				begin := time.Now()
				step := p.step(uint64(n), 0)
				copy(step.Hidden.Data, rows)
				answer, err := s.Send(step)
				if err != nil {
					b.Fatal(err)
				}
				r, err := answer.Wait(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				copy(back, r.Hidden.Data)
				took = append(took, time.Since(begin))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		})
	}
}

// BenchmarkMasks measures what a mask of 19 KB, a vocabulary of 152,000, for each of eight sequences adds to a step.
func BenchmarkMasks(b *testing.B) {
	const vocabulary, sequences = 152_000, 8
	for _, masked := range []bool{false, true} {
		b.Run(fmt.Sprintf("masked=%v", masked), func(b *testing.B) {
			p := start(b, nil, envMisuse+"=head")
			s := p.load(b, sdk.RegionLayout{Slots: 1, InBytes: 4 * sequences, MaskBytes: sequences * vocabulary / 8})
			mask := bytes.Repeat([]byte{0xa5}, vocabulary/8)
			var took []time.Duration
			for n := 0; b.Loop(); n++ {
				step := &sdk.Step{ID: uint64(n), Hidden: sdk.Tensor{Dtype: sdk.DtypeFloat32, Rows: sequences, Width: 1, Data: p.region.In(0)}}
				for i := range sequences {
					q := sdk.SeqStep{Seq: sdk.SeqID(i), Pos: n, Rows: 1, Want: sdk.WantToken}
					if masked {
						q.Allowed = mask
					}
					step.Seqs = append(step.Seqs, q)
				}
				begin := time.Now()
				answer, err := s.Send(step)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := answer.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(begin))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
		})
	}
}
