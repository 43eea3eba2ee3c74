package executor

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/sdk"
)

func start(t *testing.T, c *Catalog, spec Spec) *Process {
	t.Helper()
	p, err := c.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// startOne starts one saboteur as stage 1.
func startOne(t *testing.T, cfg Config, mode string) *Process {
	t.Helper()
	return start(t, openCatalog(t, cfg), Spec{Plugin: filepath.Join(cfg.PluginDirs[0], mode), Stage: "stage 1"})
}

func loadRequest() sdk.LoadRequest {
	return sdk.LoadRequest{
		Dir: "model", Family: "x", Layers: sdk.LayerRange{Start: 0, End: 1}, HasEmbedding: true, HasHead: true,
		Region: sdk.RegionLayout{Slots: 1, InBytes: 64, OutBytes: 64},
	}
}

// generate loads, prefills one token and decodes one, as a host would, and returns the first error.
func generate(ctx context.Context, p *Process) error {
	p.Enter(PhaseLoad)
	if _, err := p.Client().Load(ctx, loadRequest(), nil); err != nil {
		return err
	}
	p.Enter(PhasePrefill)
	steps, err := p.Client().OpenSteps(ctx)
	if err != nil {
		return err
	}
	defer steps.Close()
	reserve, err := steps.Send(sdk.Reservation{Seq: 1, Prompt: []int32{1}})
	if err != nil {
		return err
	}
	if _, err := reserve.Wait(ctx); err != nil {
		return err
	}
	for i, phase := range []Phase{PhasePrefill, PhaseDecode} {
		p.Enter(phase)
		pending, err := steps.Send(&sdk.Step{ID: uint64(i + 1), Seqs: []sdk.SeqStep{{
			Seq: 1, Pos: i, Rows: 1, Tokens: []int32{1}, Prompt: phase == PhasePrefill, Want: sdk.WantToken,
		}}})
		if err != nil {
			return err
		}
		if _, err := pending.Wait(ctx); err != nil {
			return err
		}
	}
	p.Enter(PhaseIdle)
	return nil
}

func TestGenerate(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "good")), "good")
	if err := generate(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	h, err := p.Health(t.Context())
	if err != nil || h.Stats.Steps != 2 {
		t.Errorf("health %+v, %v, want 2 steps", h, err)
	}
}

// An executor that lacks capabilities, and has one that this host does not know, serves all that it understands; what it does
// not is refused by name and never sent.
func TestLackingCapabilities(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "lacks-much")), "lacks-much")
	if err := generate(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	steps, err := p.Client().OpenSteps(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer steps.Close()
	for lacks, op := range map[string]sdk.Op{
		sdk.CapabilityShare:     sdk.Reservation{Seq: 2, From: 1, Keep: 1},
		sdk.CapabilitySnapshots: sdk.Reservation{Seq: 2, Snapshots: 1},
		sdk.CapabilityState:     sdk.StateExport{Seq: 1, Layers: sdk.LayerRange{End: 1}},
		sdk.CapabilityLogits:    &sdk.Step{ID: 1, Seqs: []sdk.SeqStep{{Seq: 1, Rows: 1, Tokens: []int32{1}, Want: sdk.WantLogits}}},
	} {
		if _, err := steps.Send(op); sdk.CodeOf(err) != sdk.CodeUnsupported || !strings.Contains(err.Error(), strconv.Quote(lacks)) {
			t.Errorf("%T: %v, want that it lacks %s", op, err, lacks)
		}
	}
	h, err := p.Health(t.Context())
	if err != nil || h.Stats.Steps != 2 {
		t.Errorf("health %+v, %v, want the two steps of before", h, err)
	}
}

func TestDeathIsNoticed(t *testing.T) {
	for _, c := range []struct {
		mode  string
		phase Phase
		text  string
	}{
		{"dies-in-load", PhaseLoad, "exit code 3; its last log lines:\n  [ERROR] about to die mode=dies-in-load"},
		{"dies-in-prefill", PhasePrefill, "exit code 3"},
		{"dies-in-decode", PhaseDecode, "out of luck"}, // a panic
	} {
		t.Run(c.mode, func(t *testing.T) {
			p := startOne(t, testConfig(t, pluginDir(t, c.mode)), c.mode)
			err := p.Explain(generate(t.Context(), p))
			death, ok := errors.AsType[*DeathError](err)
			if !ok {
				t.Fatalf("error %v, want a death", err)
			}
			if death.Phase != c.phase || death.Stage != "stage 1" || death.Plugin != p.Plugin() || death.PID != p.PID() {
				t.Errorf("death %+v, want %s in %s", death, c.mode, c.phase)
			}
			checkText(t, err, c.text)
			if !errors.Is(err, sdk.ErrExecutorGone) {
				t.Errorf("%v hides the error of the call", err)
			}
			<-p.Done()
			if p.Err() == nil {
				t.Error("Err is nil after a death")
			}
			if _, err := p.Health(t.Context()); !sameType(err, death) {
				t.Errorf("health after the death: %v", err)
			}
			stop(t, p)
		})
	}
}

func TestDeathBySignal(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "good")), "good")
	if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	death, ok := errors.AsType[*DeathError](p.Err())
	if !ok || death.Signal != syscall.SIGKILL || death.ExitCode != -1 || death.Phase != PhaseIdle {
		t.Errorf("death %+v", p.Err())
	}
	checkText(t, p.Err(), "out of memory")
	stop(t, p)
}

// TestDeathJustBeforeStop stops a process that has died, but whose death nobody has looked at yet.
func TestDeathJustBeforeStop(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "good")), "good")
	if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	stop(t, p)
	checkText(t, p.Err(), "killed by SIGKILL")
}

func TestStartAfterDeathOfTheScannedProcess(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "good"))
	c := openCatalog(t, cfg)
	if _, err := c.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(cfg.PluginDirs[0], "good")
	warm := c.warm[path]
	if err := syscall.Kill(warm.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-warm.Done()
	if p := start(t, c, Spec{Plugin: path}); p.PID() == warm.PID() {
		t.Error("the dead process was handed out")
	}
}

// stop stops a process and checks that it is reaped and that nothing of it is left.
func stop(t *testing.T, p *Process) {
	t.Helper()
	if err := p.Stop(context.Background()); err != nil {
		t.Errorf("stop: %v", err)
	}
	if err := syscall.Kill(p.PID(), 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("process %d after Stop: %v, want none, not even a zombie", p.PID(), err)
	}
	if _, err := os.Stat(p.folder); !os.IsNotExist(err) {
		t.Errorf("%s after Stop: %v", p.folder, err)
	}
}

func TestStopIsGraceful(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "good")), "good")
	if err := generate(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	stop(t, p)
	if !p.child.state.Success() {
		t.Errorf("it ended with %v, want exit code 0", p.child.state)
	}
	if p.Err() != nil {
		t.Errorf("Err %v after a stop", p.Err())
	}
	stop(t, p) // again
}

func TestStopEscalates(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "ignores-sigterm"))
	cfg.GraceTimeout, cfg.TermTimeout = 100*time.Millisecond, 100*time.Millisecond
	p := startOne(t, cfg, "ignores-sigterm")
	stop(t, p)
	if status := p.child.state.Sys().(syscall.WaitStatus); status.Signal() != syscall.SIGKILL {
		t.Errorf("it ended with %v, want SIGKILL", p.child.state)
	}
}

func TestStopOfAStoppedProcess(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "good"))
	cfg.GraceTimeout, cfg.TermTimeout = 100*time.Millisecond, 100*time.Millisecond
	p := startOne(t, cfg, "good")
	pause(t, p)
	stop(t, p)
}

func TestStopObeysItsContext(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "good")), "good") // its own timeouts are a minute
	pause(t, p)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.Stop(ctx); err != nil {
		t.Error(err)
	}
	stop(t, p)
}

func TestStopByManyAtOnce(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "good")), "good")
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() { stop(t, p) })
	}
	all.Wait()
}

func TestHealthOfAStoppedProcess(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "good"))
	cfg.GraceTimeout, cfg.TermTimeout = 100*time.Millisecond, 100*time.Millisecond
	p := startOne(t, cfg, "good")
	pause(t, p)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	_, err := p.Health(ctx)
	if silent, ok := errors.AsType[*UnresponsiveError](err); !ok || silent.PID != p.PID() || silent.Stage != "stage 1" {
		t.Errorf("health %v, want that it does not answer", err)
	}
}

func TestKillEndsAPausedProcess(t *testing.T) {
	p := startOne(t, testConfig(t, pluginDir(t, "good")), "good")
	if _, err := p.Health(t.Context()); err != nil { // it tells of its memory
		t.Fatal(err)
	}
	pause(t, p)
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	<-p.Done()
	if death, ok := errors.AsType[*DeathError](p.Err()); !ok || death.Signal != syscall.SIGKILL {
		t.Errorf("it ended with %v, want SIGKILL", p.Err())
	} else if death.Stats == nil || !strings.Contains(death.Error(), "it last held 3.0 MiB resident: 0.0 MiB of weights, 2.0 MiB of state") {
		t.Errorf("%v with %+v, want the last of what it told", death, death.Stats)
	}
	stop(t, p)
}

func pause(t *testing.T, p *Process) {
	t.Helper()
	if err := syscall.Kill(p.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
}

func TestNothingLeaks(t *testing.T) {
	c := openCatalog(t, testConfig(t, pluginDir(t, "good", "dies-at-start")))
	cycle := func() {
		if _, err := c.Scan(t.Context()); err != nil {
			t.Fatal(err)
		}
		p := start(t, c, Spec{Plugin: filepath.Join(c.cfg.PluginDirs[0], "good")})
		if err := generate(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		stop(t, p)
	}
	cycle() // whatever is opened once
	files, goroutines := len(namesIn(t, "/dev/fd")), runtime.NumGoroutine()
	for range 3 {
		cycle()
	}
	waitFor(t, "descriptors and goroutines to be given back", func() bool {
		return len(namesIn(t, "/dev/fd")) <= files && runtime.NumGoroutine() <= goroutines
	})
}

// TestKilledHost kills a host with SIGKILL: its executors must end, also one that is stopped or deaf, and the
// next start must remove its run folder.
func TestKilledHost(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "good", "ignores-sigterm"))
	cfg.GraceTimeout, cfg.TermTimeout = 100*time.Millisecond, 100*time.Millisecond
	host, out := startHost(t, cfg)
	var pids []int
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "ready" {
		pids = append(pids, parsePID(t, lines.Text()))
	}
	if len(pids) != 4 {
		t.Fatalf("host ended early, or with %d executors", len(pids))
	}
	left := namesIn(t, cfg.RunBase)
	if len(left) != 1 {
		t.Errorf("run folders %q of a living host, want one", left)
	}
	killHost(t, host)
	for _, pid := range pids {
		waitGone(t, pid)
	}
	next := openCatalog(t, cfg) // sweeps
	if now := namesIn(t, cfg.RunBase); len(now) != 1 || now[0] == left[0] {
		t.Errorf("run folders %q after the next start, had %q", now, left)
	}
	if shared, _ := filepath.Glob("/dev/shm/mlxcel*"); len(shared) != 0 {
		t.Errorf("shared memory %q left", shared)
	}
	if _, err := next.Scan(t.Context()); err != nil {
		t.Error(err)
	}
}

// startHost runs a host in a process of its own.
func startHost(t *testing.T, cfg Config) (*exec.Cmd, io.Reader) {
	t.Helper()
	host := exec.Command(os.Args[0])
	host.Env = append(os.Environ(), hostFlag+"="+cfg.PluginDirs[0], "MLXCEL_TEST_RUN="+cfg.RunBase)
	host.Stderr = os.Stderr
	out, err := host.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := host.Start(); err != nil {
		t.Fatal(err)
	}
	return host, out
}

func killHost(t *testing.T, host *exec.Cmd) {
	t.Helper()
	if err := host.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = host.Wait() // says that it was killed
}

// runHost is a host with two executors of each kind in the folder, one of them stopped. It waits to be killed.
func runHost() {
	c, err := Open(Config{PluginDirs: []string{os.Getenv(hostFlag)}, UID: os.Getuid(), RunBase: os.Getenv("MLXCEL_TEST_RUN"), StartTimeout: time.Minute})
	if err != nil {
		panic(err)
	}
	entries, err := c.Scan(context.Background())
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		for range 2 {
			p, err := c.Start(context.Background(), Spec{Plugin: e.Path})
			if err != nil {
				panic(err)
			}
			if _, err := p.Client().Load(context.Background(), loadRequest(), nil); err != nil {
				panic(err)
			}
			fmt.Println(p.PID())
			if e.Name == "good" {
				_ = syscall.Kill(p.PID(), syscall.SIGSTOP)
			}
		}
	}
	fmt.Println("ready")
	select {}
}

// waitFor polls until a condition holds.
func waitFor(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited a minute for %s", what)
		}
	}
}

// waitGone polls until a process that is not our child is gone, or at most a zombie of whoever adopted it.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	waitFor(t, fmt.Sprintf("the end of process %d", pid), func() bool {
		if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			return true
		}
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return false
		}
		_, after, _ := strings.Cut(string(stat), ") ")
		return strings.HasPrefix(after, "Z")
	})
}

func readPID(t *testing.T, file string) int {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return parsePID(t, strings.TrimSpace(string(text)))
}

func parsePID(t *testing.T, text string) int {
	t.Helper()
	pid, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

func sumOfSelf(t *testing.T) string {
	t.Helper()
	f, err := os.Open(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// recorder collects a log.
type recorder struct {
	mu  sync.Mutex
	log strings.Builder
}

func (r *recorder) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.Write(b)
}

func (r *recorder) text() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.log.String()
}

// BenchmarkDeathNotice measures the time from the SIGKILL of an executor to the closing of Done.
func BenchmarkDeathNotice(b *testing.B) {
	benchmark(b, func(p *Process) {
		if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
			b.Fatal(err)
		}
		<-p.Done()
	})
}

// BenchmarkStop measures a graceful stop.
func BenchmarkStop(b *testing.B) {
	benchmark(b, func(p *Process) {
		if err := p.Stop(context.Background()); err != nil {
			b.Fatal(err)
		}
	})
}

// benchmark times what is done to a fresh executor.
func benchmark(b *testing.B, do func(*Process)) {
	cfg := testConfig(b, pluginDir(b, "good"))
	c := openCatalog(b, cfg)
	for b.Loop() {
		b.StopTimer()
		p, err := c.Launch(b.Context(), Spec{Plugin: filepath.Join(cfg.PluginDirs[0], "good")})
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		do(p)
		b.StopTimer()
		if err := p.Stop(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkScan measures a scan of four executors, stopping the ones of the scan before included.
func BenchmarkScan(b *testing.B) {
	c := openCatalog(b, testConfig(b, pluginDir(b, "good", "noisy", "serves-two", "tells-environment")))
	for b.Loop() {
		if _, err := c.Scan(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkStart measures the start of one executor up to its first answer.
func BenchmarkStart(b *testing.B) {
	cfg := testConfig(b, pluginDir(b, "good"))
	c := openCatalog(b, cfg)
	for b.Loop() {
		p, err := c.Launch(b.Context(), Spec{Plugin: filepath.Join(cfg.PluginDirs[0], "good")})
		if err != nil {
			b.Fatal(err)
		}
		if err := p.Client().Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := p.Stop(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
