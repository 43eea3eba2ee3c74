package executor

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/mlxcel/mlxcel/sdk"
)

// pluginDir makes a plugin folder of links to the test binary.
func pluginDir(t testing.TB, names ...string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range names {
		if err := os.Symlink(self, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// testConfig is a host's configuration that finds executors in dirs only.
func testConfig(t testing.TB, dirs ...string) Config {
	t.Helper()
	base, err := os.MkdirTemp("", "mlxt") // t.TempDir is too long for a socket on macOS
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	return Config{
		PluginDirs: dirs,
		Environ:    []string{"PATH=" + os.Getenv("PATH")},
		UID:        os.Getuid(),
		RunBase:    filepath.Join(base, "run"),
		// Generous: a loaded machine must not fail a test. Tests of the timeouts set their own.
		StartTimeout: time.Minute, GraceTimeout: time.Minute, TermTimeout: time.Minute,
		Logger: hclog.New(&hclog.LoggerOptions{Output: testWriter{t}, Level: hclog.Info}),
	}
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}

// openCatalog opens a catalog that leaves nothing behind, and checks that.
func openCatalog(t testing.TB, cfg Config) *Catalog {
	t.Helper()
	c, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil {
			t.Errorf("close: %v", err)
		}
		if left := namesIn(t, cfg.RunBase); len(left) != 0 {
			t.Errorf("%q left in the run folder", left)
		}
	})
	return c
}

// scanOne scans a folder with one candidate.
func scanOne(t *testing.T, cfg Config) Entry {
	t.Helper()
	entries, err := openCatalog(t, cfg).Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 {
		t.Fatalf("entries %+v, want one", entries)
	}
	return entries[0]
}

func TestScanDescribes(t *testing.T) {
	dir := pluginDir(t, "good")
	e := scanOne(t, testConfig(t, dir))
	if e.Problem != nil {
		t.Fatal(e.Problem)
	}
	if e.Path != filepath.Join(dir, "good") || e.Name != "good" || e.Version != "1.2.3" || e.ContractVersion != sdk.ContractVersion ||
		e.Checksum != ChecksumNone || e.Device.Kind != "cpu" || len(e.Families) != 1 || e.Families[0].Name != "good" {
		t.Errorf("entry %+v", e)
	}
}

// TestRefusals has each way in which a program in a plugin folder can be unfit.
func TestRefusals(t *testing.T) {
	const brief = 5 * time.Second // for those whose start never ends
	for _, c := range []struct {
		name   string
		script string // the program; a link to the test binary when empty
		start  time.Duration
		want   error  // an error of this type
		text   string // and with this in its text
	}{
		{name: "greets", script: "#!/bin/sh\necho hello\n", want: &NotPluginError{}, text: `printed "hello"`},
		{name: "greets-and-fails", script: "#!/bin/sh\necho hello\nexit 1\n", want: &NotPluginError{}, text: `printed "hello"`},
		{name: "says-nothing", script: "#!/bin/sh\nexit 0\n", want: &NotPluginError{}, text: "without the handshake"},
		{name: "prints-on", script: "#!/bin/sh\nexec yes junk\n", want: &NotPluginError{}, text: `printed "junk"`},
		{name: "greets-and-hangs", script: "#!/bin/sh\necho hello\nexec sleep 600\n", start: brief, want: &NotPluginError{}, text: `printed "hello"`},
		{name: "hangs-with-a-child", script: "#!/bin/sh\nsleep 600\n", start: brief, want: &StartTimeoutError{}, text: "within 5s"},
		{name: "false-handshake", script: "#!/bin/sh\necho '1|2|unix|/nowhere|grpc|'\nexec sleep 600\n", want: &NotPluginError{}, text: "/nowhere"},
		{name: "garbled-handshake", script: "#!/bin/sh\necho '1|2|carrier|pigeon|grpc|'\nexec sleep 600\n", want: &NotPluginError{}, text: "pigeon"},
		{name: "for-another-machine", script: "\x7fELF\x02\x01\x01\x00 nothing that runs", want: &NotPluginError{}, text: "exec format error"},
		{name: "dies-at-start", want: &DeathError{}, text: "exit code 127; its last log lines:\n  library not found"},
		{name: "killed-at-start", script: "#!/bin/sh\nkill -9 $$\n", want: &DeathError{}, text: "killed by SIGKILL"},
		{name: "closes-its-output", script: "#!/bin/sh\nexec sleep 600 >&-\n", want: &NotPluginError{}, text: "without the handshake"},
		{name: "hangs-at-start", start: brief, want: &StartTimeoutError{}, text: "waiting for a device"},
		{name: "next-contract", want: &ContractError{}, text: "speaks contract version 3, this host speaks version 2: update mlxcel"},
		{name: "contract-1", want: &ContractError{}, text: "speaks contract version 1, this host speaks version 2: update the executor"},
		{name: "dies-in-describe", want: &DeathError{}, text: "died in describe: exit code 3; its last log lines:\n  [ERROR] about to die mode=dies-in-describe"},
		{name: "hangs-in-describe", start: brief, want: &StartTimeoutError{}, text: "hung in describe"},
		{name: "serves-nothing", text: "serves no family"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := pluginDir(t)
			if c.script == "" {
				dir = pluginDir(t, c.name)
			} else {
				writeFile(t, filepath.Join(dir, c.name), c.script, 0o755)
			}
			t.Parallel() // only now: a script can't be run while a fork still holds it open for writing
			cfg := testConfig(t, dir)
			if c.start != 0 {
				cfg.StartTimeout = c.start
			}
			e := scanOne(t, cfg)
			if e.Used() {
				t.Fatalf("%+v is used", e)
			}
			if c.want != nil && !sameType(e.Problem, c.want) {
				t.Errorf("error of type %T: %v, want %T", e.Problem, e.Problem, c.want)
			}
			checkText(t, e.Problem, c.text)
			checkText(t, e.Problem, filepath.Join(dir, c.name))
		})
	}
}

// sameType tells whether an error in err's chain has the type of want.
func sameType(err, want error) bool {
	var ok bool
	switch want.(type) {
	case *NotPluginError:
		_, ok = errors.AsType[*NotPluginError](err)
	case *StartTimeoutError:
		_, ok = errors.AsType[*StartTimeoutError](err)
	case *ContractError:
		_, ok = errors.AsType[*ContractError](err)
	case *DeathError:
		_, ok = errors.AsType[*DeathError](err)
	}
	return ok
}

func TestScanKillsTheChildrenOfARefusedProgram(t *testing.T) {
	dir := pluginDir(t)
	pidFile := filepath.Join(t.TempDir(), "pid")
	writeFile(t, filepath.Join(dir, "forks"), "#!/bin/sh\nsleep 600 &\necho $! >"+pidFile+"\necho hello\n", 0o755)
	scanOne(t, testConfig(t, dir))
	waitGone(t, readPID(t, pidFile))
}

func TestScanChecksums(t *testing.T) {
	for _, c := range []struct {
		name    string
		sum     string // beside the binary; computed when "good"
		require bool
		want    ChecksumState
		text    string
	}{
		{"none asked", "", false, ChecksumNone, ""},
		{"missing", "", true, ChecksumMissing, "has no checksum"},
		{"wrong", sumA, false, ChecksumMismatch, "has the wrong checksum"},
		{"right", "good", true, ChecksumOK, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := pluginDir(t, "good")
			if c.sum == "good" {
				c.sum = sumOfSelf(t)
			}
			if c.sum != "" {
				writeFile(t, filepath.Join(dir, "good.sha256"), c.sum+"  good\n", 0o644)
			}
			cfg := testConfig(t, dir)
			cfg.RequireChecksum = c.require
			e := scanOne(t, cfg)
			if e.Checksum != c.want {
				t.Errorf("state %v, want %v", e.Checksum, c.want)
			}
			checkText(t, e.Problem, c.text)
		})
	}
}

func TestStartChecksAgain(t *testing.T) {
	dir := pluginDir(t, "good")
	sum := filepath.Join(dir, "good.sha256")
	writeFile(t, sum, sumOfSelf(t), 0o644)
	c := openCatalog(t, testConfig(t, dir))
	if _, err := c.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	writeFile(t, sum, sumA, 0o644)
	_, err := c.Launch(t.Context(), Spec{Plugin: filepath.Join(dir, "good")})
	checkText(t, err, "wrong checksum")
}

func TestScanRefusesUntrusted(t *testing.T) {
	dir := pluginDir(t, "good")
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "script"), "#!/bin/sh\nexit 0\n", 0o755)
	entries, err := openCatalog(t, testConfig(t, dir)).Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	// The link's target lies in a safe folder, but whoever may write the folder may point it elsewhere.
	for _, e := range entries {
		checkText(t, e.Problem, "chmod o-w "+dir)
	}
}

func TestScanOrderAndDuplicates(t *testing.T) {
	first, second := pluginDir(t, "good@1", "serves-two"), pluginDir(t, "good@2")
	writeFile(t, filepath.Join(second, "forgotten"), "#!/bin/sh\n", 0o644)
	cfg := testConfig(t, first, second, filepath.Join(second, "missing"))
	c := openCatalog(t, cfg)
	entries, err := c.Scan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		line := filepath.Base(e.Path)
		for _, f := range e.Families {
			line += " " + f.Name
		}
		got = append(got, line)
	}
	if want := []string{"good@1 good", "serves-two other", "forgotten", "good@2", "missing"}; !slices.Equal(got, want) {
		t.Errorf("entries %q, want %q", got, want)
	}
	good := filepath.Join(first, "good@1")
	if s := entries[1].Shadowed; len(s) != 1 || s[0] != (Shadow{"good", good}) {
		t.Errorf("shadowed %+v, want good by %s", s, good)
	}
	checkText(t, entries[3].Problem, "good by "+good)
	checkText(t, entries[4].Problem, "named by --plugin-dir")
}

func TestLookUp(t *testing.T) {
	dir := pluginDir(t, "good", "noisy@x", "dies-at-start")
	c := openCatalog(t, testConfig(t, dir))
	if _, err := c.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		choice func() (Choice, error)
	}{
		{"model type", func() (Choice, error) { return c.ForModelType("good_text") }},
		{"family", func() (Choice, error) { return c.ForFamily("good") }},
		{"container", func() (Choice, error) { return c.ForImport("gguf:good") }},
	} {
		got, err := c.choice()
		if err != nil || got.Entry.Name != "good" || got.Family.Name != "good" {
			t.Errorf("%s: %+v, %v", c.name, got, err)
		}
	}
	_, err := c.ForModelType("mamba9")
	unknown, ok := errors.AsType[*UnknownModelError](err)
	if !ok || len(unknown.Installed) != 2 || len(unknown.Unused) != 1 || !slices.Equal(unknown.Folders, []string{dir}) {
		t.Fatalf("error %+v", err)
	}
	for _, part := range []string{`model_type "mamba9"`, "good (by " + filepath.Join(dir, "good") + ")", "library not found", "--plugin-dir", dir} {
		checkText(t, err, part)
	}
}

func TestLookUpInEmptyCatalog(t *testing.T) {
	c := openCatalog(t, testConfig(t, pluginDir(t)))
	if _, err := c.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := c.ForFamily("llama")
	checkText(t, err, "none is installed")
}

func TestScanIsCancelled(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "good", "hangs-at-start", "hangs-in-describe"))
	c := openCatalog(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	scanned := make(chan error, 1)
	go func() {
		_, err := c.Scan(ctx)
		scanned <- err
	}()
	waitFor(t, "an executor to start", func() bool { return c.running() > 0 })
	cancel()
	if err := <-scanned; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want a cancellation", err)
	}
	if n := c.running(); n != 0 {
		t.Errorf("%d executors run after the cancellation", n)
	}
}

func TestStartReusesTheScannedProcess(t *testing.T) {
	dir := pluginDir(t, "good", "noisy")
	c := openCatalog(t, testConfig(t, dir))
	if _, err := c.Scan(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := c.running(); n != 2 {
		t.Errorf("%d executors run after the scan, want 2", n)
	}
	spec := Spec{Plugin: filepath.Join(dir, "good"), Stage: "stage 0"}
	first := start(t, c, spec)
	if n := c.running(); n != 2 {
		t.Errorf("%d executors run after a start, want 2 still", n)
	}
	second := start(t, c, spec)
	if first.PID() == second.PID() {
		t.Errorf("two stages share process %d", first.PID())
	}
	if err := c.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := c.running(); n != 2 {
		t.Errorf("%d executors run, want the two stages", n)
	}
}

func TestEnvironmentIsClean(t *testing.T) {
	cfg := testConfig(t, pluginDir(t, "tells-environment"))
	cfg.Environ = append(cfg.Environ, "HF_TOKEN=secret", "MLXCEL_CLUSTER_SECRET=secret", "LD_PRELOAD=", "MLX_X=1", "EXTRA=yes")
	cfg.PassEnv = []string{"EXTRA"}
	t.Setenv("HF_TOKEN", "secret") // nor does the real one leak
	e := scanOne(t, cfg)
	if e.Problem != nil {
		t.Fatal(e.Problem)
	}
	var env []string
	if err := json.Unmarshal([]byte(e.Version), &env); err != nil {
		t.Fatal(err)
	}
	var names []string
	for name := range environment(env) {
		names = append(names, name)
	}
	slices.Sort(names)
	want := []string{
		"EXTRA", "MLXCEL_CHANNEL_FD", "MLXCEL_EXECUTOR", "MLXCEL_LIFELINE_FD", "MLXCEL_LOG_LEVEL", "MLXCEL_REGION_FD", "MLX_X", "PATH",
		"PLUGIN_CLIENT_CERT", "PLUGIN_MAX_PORT", "PLUGIN_MIN_PORT", "PLUGIN_PROTOCOL_VERSIONS", "PLUGIN_UNIX_SOCKET_DIR", "TMPDIR",
	}
	if !slices.Equal(names, want) {
		t.Errorf("environment %q, want %q", names, want)
	}
	if tmp := environment(env)["TMPDIR"]; !strings.HasPrefix(tmp, cfg.RunBase+"/") {
		t.Errorf("TMPDIR %s lies outside the run folder %s", tmp, cfg.RunBase)
	}
}

func TestNoiseDoesNoHarm(t *testing.T) {
	lines := &recorder{}
	cfg := testConfig(t, pluginDir(t, "noisy"))
	cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: lines, Level: hclog.Debug, DisableTime: true})
	if e := scanOne(t, cfg); e.Problem != nil {
		t.Fatal(e.Problem)
	}
	for _, want := range []string{
		`noisy: executor printed: stdout="banner before the handshake"`,
		"[DEBUG] noisy: banner in describe",
		"[WARN]  noisy: through the logger: answer=42",
		"[DEBUG] noisy: through os.Stdout",
	} {
		waitFor(t, want, func() bool { return strings.Contains(lines.text(), want) })
	}
}

func TestOpenValidates(t *testing.T) {
	_, err := Open(Config{StartTimeout: -1, GraceTimeout: -1})
	for _, part := range []string{"TMPDIR", "start timeout", "grace timeout"} {
		checkText(t, err, part)
	}
}

// running counts the executors that live.
func (l *launcher) running() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.live)
}
