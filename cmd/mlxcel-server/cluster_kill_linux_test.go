package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/cmd/internal/hosts"
)

// quickCells are tried by every run of the tests; MLXCEL_KILL_MATRIX=all tries them all.
var quickCells = []hosts.Cell{
	{Victim: hosts.CoordinatorHost, Signal: syscall.SIGKILL, Phase: hosts.Load},
	{Victim: hosts.CoordinatorHost, Signal: syscall.SIGKILL, Phase: hosts.Decode},
	{Victim: hosts.CoordinatorHost, Signal: syscall.SIGSTOP, Phase: hosts.Idle},
	{Victim: hosts.StageHost, Signal: syscall.SIGKILL, Phase: hosts.Offer},
	{Victim: hosts.StageHost, Signal: syscall.SIGKILL, Phase: hosts.Prefill},
	{Victim: hosts.StageHost, Signal: syscall.SIGKILL, Phase: hosts.Drain},
	{Victim: hosts.StageHost, Signal: syscall.SIGSTOP, Phase: hosts.Decode},
	{Victim: hosts.ExecutorProcess, Signal: syscall.SIGKILL, Phase: hosts.Idle},
	{Victim: hosts.ExecutorProcess, Signal: syscall.SIGKILL, Phase: hosts.Canary},
	{Victim: hosts.ExecutorProcess, Signal: syscall.SIGSTOP, Phase: hosts.Decode},
}

// Whatever dies or stands still, whenever: who must notice does in time, the client is told, nothing is left behind, and the
// next bring-up works.
func TestKillMatrix(t *testing.T) {
	want := server(t).choices("x")
	for _, cell := range hosts.Matrix() {
		if os.Getenv("MLXCEL_KILL_MATRIX") != "all" && !slices.Contains(quickCells, cell) {
			continue
		}
		t.Run(cell.String(), func(t *testing.T) {
			if cell.Phase == hosts.Commit {
				hosts.Play(t, cell, newKillScene(t, hosts.New(t, clusterHosts(2)...), cell, want)) // loopback has no wire to cut
				return
			}
			hosts.Play(t, cell, newKillScene(t, hosts.Either(t, clusterHosts(2)...), cell, want))
		})
	}
}

// killScene is a cluster of two stages that a cell of the matrix is tried on. Stage 1 is what holds the cluster in a phase that
// would be over at once.
type killScene struct {
	*testCluster
	cell   hosts.Cell
	want   string // the tokens of one process
	server *running

	executor *hosts.Executor // the victim, where it is an executor
	let      func()          // ends what holds the cluster in its phase
	waiting  hosts.Holdings  // of the peers that wait
	reached  hosts.Holdings  // of all in the phase
	orphans  []*hosts.Executor
	stream   *bufio.Reader // of the request under way in decode and drain
	answer   chan string   // to the one in prefill
}

func newKillScene(t *testing.T, n *hosts.Network, cell hosts.Cell, want string) *killScene {
	s := &killScene{testCluster: newCluster(t, n, tiny), cell: cell, want: want, let: func() {}}
	if cell.Phase == hosts.Commit {
		s.at = (*hosts.Host).OnWire
	}
	return s
}

// serves tells whether the cluster is up in the cell's phase, and comes up again by itself.
func (s *killScene) serves() bool {
	return slices.Contains([]hosts.Phase{hosts.Idle, hosts.Prefill, hosts.Decode}, s.cell.Phase)
}

// victim is the stage whose host is struck: the last where it holds nothing, else the first.
func (s *killScene) victim() int {
	if s.cell.Phase == hosts.Decode || s.cell.Phase == hosts.Drain {
		return 1
	}
	return 0
}

func inPhase(phase string) hosts.Match { return hosts.IsMessage("phase").With("phase", phase) }

// executorOf returns a peer's executor for the model.
func executorOf(t testing.TB, p *hosts.Process) *hosts.Executor {
	t.Helper()
	all := p.Executors(t)
	all = slices.DeleteFunc(all, func(e *hosts.Executor) bool { return e.Family != "llama" })
	if len(all) != 1 {
		t.Fatalf("%s has %d executors for the model, want 1", p, len(all))
	}
	return all[0]
}

func (s *killScene) Reach(t testing.TB) {
	switch s.cell.Phase {
	case hosts.Waiting:
		s.reachWaiting(t)
	case hosts.Offer:
		s.reachOffer(t)
	case hosts.Commit:
		s.reachCommit(t)
	case hosts.Load:
		s.reachLoad(t)
	case hosts.Canary:
		s.reachCanary(t)
	default:
		s.startPeers()
		s.waiting = s.net.Snapshot(t)
		s.startCoordinator("--metrics", "--prefill-chunk-size", "8")
		s.server = s.ready()
		s.reachRequest(t)
	}
	s.reached = s.net.Snapshot(t)
	if s.cell.Victim == hosts.StageHost {
		s.orphans = s.peers[s.victim()].Executors(t)
	}
	if s.cell.Victim == hosts.CoordinatorHost {
		s.orphans = s.coordinator.Executors(t)
	}
}

// reachWaiting lets the coordinator find one peer of two.
func (s *killScene) reachWaiting(t testing.TB) {
	s.startPeer(0).Await(t, isWaiting)
	s.waiting = s.net.Snapshot(t)
	s.executor = executorOf(t, s.peers[0])
	s.startCoordinator()
	s.coordinator.Await(t, hosts.IsMessage("reached a peer").With("node", "stage-0"))
}

// reachOffer stops the executor of stage 1 once the coordinator has learned of it: a peer that is offered a stage asks its
// executor for the memory that it has. Until then stage 0 is stopped, so that there is nothing to offer.
func (s *killScene) reachOffer(t testing.TB) {
	s.startPeers()
	s.waiting = s.net.Snapshot(t)
	s.peers[0].Signal(t, syscall.SIGSTOP)
	s.startCoordinator()
	s.coordinator.Await(t, hosts.IsMessage("reached a peer").With("node", "stage-1"))
	s.executor = executorOf(t, s.peers[1])
	s.executor.Signal(t, syscall.SIGSTOP)
	s.let = func() { s.executor.Signal(t, syscall.SIGCONT) }
	s.peers[0].Signal(t, syscall.SIGCONT)
	s.peers[0].Await(t, inPhase("offered"))
	s.peers[1].Await(t, inPhase("offered"))
}

// reachCommit cuts the way to stage 1 behind its offer.
func (s *killScene) reachCommit(t testing.TB) {
	s.reachOffer(t)
	coordinator, last := s.net.Host(coordinatorHost), s.peerHost(1)
	s.net.Wire.ShapePath(coordinator, last, hosts.Quality{Cut: true})
	s.let()
	s.let = func() { s.net.Wire.ShapePath(coordinator, last, hosts.Quality{}) }
	s.peers[0].Await(t, inPhase("committed"))
	s.executor = executorOf(t, s.peers[0])
}

// reachLoad stops the executor of stage 1 between its offer and its load. The coordinator is stopped meanwhile.
func (s *killScene) reachLoad(t testing.TB) {
	s.reachOffer(t)
	s.coordinator.Signal(t, syscall.SIGSTOP)
	s.executor.Signal(t, syscall.SIGCONT)
	s.peers[1].Await(t, hosts.IsMessage("accepted a stage"))
	s.executor.Signal(t, syscall.SIGSTOP)
	s.coordinator.Signal(t, syscall.SIGCONT)
	s.peers[1].Await(t, inPhase("loading"))
	s.peers[0].Await(t, inPhase("loaded"))
	s.server = s.testCluster.server()
	if status, body := s.server.get("/health"); status != http.StatusServiceUnavailable {
		t.Errorf("while the weights are loaded, health is %d: %s", status, body)
	}
}

// reachCanary stops it between its load and the canary.
func (s *killScene) reachCanary(t testing.TB) {
	s.reachLoad(t)
	s.coordinator.Signal(t, syscall.SIGSTOP)
	s.executor.Signal(t, syscall.SIGCONT)
	s.peers[1].Await(t, inPhase("loaded"))
	s.executor.Signal(t, syscall.SIGSTOP)
	s.coordinator.Signal(t, syscall.SIGCONT)
	s.coordinator.Await(t, hosts.IsMessage("all peers").With("phase", "linked"))
	if status, body := s.server.get("/health"); status != http.StatusServiceUnavailable {
		t.Errorf("during the canary, health is %d: %s", status, body)
	}
}

// reachRequest brings a cluster that serves into one of the later phases.
func (s *killScene) reachRequest(t testing.TB) {
	s.executor = executorOf(t, s.peers[0])
	switch s.cell.Phase {
	case hosts.Prefill: // a prompt of many small steps, and the last stage stops in one of them
		s.answer = make(chan string, 1)
		go func() { s.answer <- s.ask(t.Context()) }()
		s.server.awaitMetrics(stepInFlight)
		s.executor = executorOf(t, s.peers[1])
		s.executor.Signal(t, syscall.SIGSTOP)
		s.let = func() { s.executor.Signal(t, syscall.SIGCONT) }
	case hosts.Decode, hosts.Drain:
		s.openStream(t)
		if s.cell.Phase == hosts.Drain {
			s.coordinator.Signal(t, syscall.SIGTERM)
			s.coordinator.Await(t, hosts.Says("draining"))
		}
	}
}

// ask returns the status and the body of an answer, or the error of the connection.
func (s *killScene) ask(ctx context.Context) string {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.server.url+"/v1/completions",
		strings.NewReader(fmt.Sprintf(`{"prompt":%q,"max_tokens":4}`, strings.Repeat("fox ", 1000))))
	if err != nil {
		return err.Error()
	}
	request.Header.Set("Content-Type", "application/json")
	answer, err := s.server.http.Do(request)
	if err != nil {
		return err.Error()
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %s", answer.StatusCode, body)
}

// stepInFlight says that a step is on its way through the stages.
var stepInFlight = regexp.MustCompile(`(?m)^mlxcel_steps_in_flight [1-9]`)

// awaitMetrics asks until the metrics, which --metrics serves, say something.
func (r *running) awaitMetrics(what *regexp.Regexp) {
	r.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(hosts.Patience); time.Now().Before(deadline); <-tick.C {
		if _, metrics := r.get("/metrics"); what.MatchString(metrics) {
			return
		}
	}
	r.t.Fatalf("the metrics never say %v", what)
}

// openStream begins a long answer.
func (s *killScene) openStream(t testing.TB) {
	t.Helper()
	answer := s.server.open(`{"prompt":"x","stream":true,"ignore_eos":true,"max_tokens":4000}`)
	t.Cleanup(func() { answer.Body.Close() })
	s.stream = bufio.NewReader(answer.Body)
	if _, err := s.stream.ReadString('\n'); err != nil {
		t.Fatal(err)
	}
}

func (s *killScene) Strike(t testing.TB) (struck time.Time) {
	switch s.cell.Victim {
	case hosts.CoordinatorHost:
		struck = s.coordinator.Signal(t, s.cell.Signal)
	case hosts.StageHost:
		struck = s.peers[s.victim()].Signal(t, s.cell.Signal)
	case hosts.ExecutorProcess:
		struck = s.executor.Signal(t, s.cell.Signal)
	}
	switch {
	case s.cell.Victim != hosts.ExecutorProcess:
		s.let()
	case s.cell.Phase == hosts.Commit: // it is needed for the load only
		s.let()
		if s.cell.Signal == syscall.SIGSTOP {
			struck = s.peers[0].Await(t, inPhase("loading")).Logged
		}
	}
	return struck
}

// spare tells whether the victim is an executor that holds no stage yet: it is replaced, and its end is no loss. Only who has committed
// already relies on it.
func (s *killScene) spare() bool {
	return s.cell.Victim == hosts.ExecutorProcess &&
		(s.cell.Phase == hosts.Waiting || s.cell.Phase == hosts.Offer || s.cell.Phase == hosts.Commit && s.cell.Signal == syscall.SIGKILL)
}

func (s *killScene) Witnesses() []hosts.Witness {
	down := hosts.IsMessage("the cluster goes down")
	switch {
	case s.spare() && s.cell.Phase == hosts.Offer:
		return []hosts.Witness{{Process: s.peers[1], Match: hosts.IsMessage("an executor that waited for a stage is replaced")}}
	case s.spare():
		return nil // until it is asked for
	case s.cell.Victim == hosts.CoordinatorHost && (s.cell.Phase == hosts.Waiting || s.cell.Phase == hosts.Commit): // the way to stage 1 is cut then
		return []hosts.Witness{{Process: s.peers[0], Match: hosts.IsMessage("the stage ends")}}
	case s.cell.Victim == hosts.CoordinatorHost:
		return []hosts.Witness{{Process: s.peers[0], Match: hosts.IsMessage("the stage ends")}, {Process: s.peers[1], Match: hosts.IsMessage("the stage ends")}}
	case s.cell.Phase == hosts.Waiting:
		return []hosts.Witness{{Process: s.coordinator, Match: hosts.IsMessage("a peer is gone again").With("node", "stage-0")}}
	}
	return []hosts.Witness{{Process: s.coordinator, Match: down}}
}

// culprit is the stage that the coordinator must blame.
func (s *killScene) culprit() int {
	if s.cell.Victim == hosts.StageHost {
		return s.victim()
	}
	if s.cell.Victim == hosts.ExecutorProcess && slices.Contains([]hosts.Phase{hosts.Load, hosts.Canary, hosts.Prefill}, s.cell.Phase) {
		return 1
	}
	return 0
}

func (s *killScene) CheckClient(t testing.TB) {
	s.checkBlame(t)
	lost := fmt.Sprintf(`"code":"stage_lost","stage":%d`, s.culprit())
	node := fmt.Sprintf("stage-%d", s.culprit())
	switch {
	case s.cell.Victim == hosts.CoordinatorHost && s.cell.Signal == syscall.SIGSTOP:
		return // nobody answers before it goes on, see Recover
	case s.cell.Phase == hosts.Prefill:
		got := <-s.answer
		if want := "503 "; s.cell.Victim != hosts.CoordinatorHost && (!strings.HasPrefix(got, want) || !strings.Contains(got, lost) || !strings.Contains(got, node) || !strings.Contains(got, "after 0 tokens")) {
			t.Errorf("the client got %s; want %s, %s, %s", got, want, lost, node)
		} else if s.cell.Victim == hosts.CoordinatorHost && !strings.Contains(got, "EOF") && !strings.Contains(got, "reset") {
			t.Errorf("the client of a killed coordinator got %s", got)
		}
	case s.stream != nil:
		s.checkStream(t, lost, node)
	case s.cell.Phase == hosts.Idle && s.cell.Victim == hosts.StageHost: // it is away until Recover
		if got := s.ask(t.Context()); !strings.HasPrefix(got, "503 ") || !strings.Contains(got, lost) || !strings.Contains(got, node) {
			t.Errorf("without stage 0 a request gets %s", got)
		}
		if status, body := s.server.get("/health"); status != http.StatusServiceUnavailable || !strings.Contains(body, lost) {
			t.Errorf("without stage 0 health is %d: %s", status, body)
		}
	}
}

// checkBlame finds the right stage in the coordinator's log.
func (s *killScene) checkBlame(t testing.TB) {
	t.Helper()
	if s.cell.Victim == hosts.CoordinatorHost || s.cell.Phase == hosts.Waiting || s.spare() {
		return
	}
	for _, e := range s.coordinator.Events() {
		if reason := fmt.Sprint(e.Fields["error"]); e.Message == "the cluster goes down" && !strings.HasPrefix(reason, fmt.Sprintf("stage %d (stage-%d ", s.culprit(), s.culprit())) {
			t.Errorf("stage %d is lost, and the coordinator logs %s", s.culprit(), reason)
		}
	}
}

// checkStream reads an answer that had begun to its end. Only a coordinator that lives can say why it ends.
func (s *killScene) checkStream(t testing.TB, lost, node string) {
	t.Helper()
	rest, err := io.ReadAll(s.stream)
	end := string(rest[max(0, len(rest)-1000):])
	if strings.Contains(end, "[DONE]") {
		t.Errorf("the answer ends as if it were whole: %q", end)
	}
	if s.cell.Victim == hosts.CoordinatorHost {
		return
	}
	_, event, isError := strings.Cut(end, "event: error\n")
	if err != nil || !isError || !strings.Contains(event, lost) || !strings.Contains(event, node) {
		t.Errorf("the answer ends with %q (%v); want an error event with %s, %s", end, err, lost, node)
	}
}

func (s *killScene) CheckLeft(t testing.TB) {
	for i, p := range s.peers { // the survivors wait again
		if p != nil && !(i == s.victim() && s.cell.Victim == hosts.StageHost) && !s.spare() && s.cell.Phase != hosts.Waiting && !s.comesBack() {
			p.Await(t, isWaiting)
		}
	}
	killed := s.victimHost()
	if killed != "" {
		for _, e := range s.orphans {
			e.AwaitEnd(t)
		}
	}
	if s.spare() || s.comesBack() || s.cell.Signal == syscall.SIGSTOP && s.cell.Victim != hosts.ExecutorProcess {
		return // what goes on holds what it needs
	}
	if s.serves() && killed == s.peerHost(s.victim()).Name {
		s.checkPeerHolds(t, s.peerHost(1-s.victim()).Name)
		return
	}
	var before hosts.Holdings
	for _, thing := range s.waiting {
		if thing.Host != killed || thing.Kind == hosts.KindFile || thing.Kind == hosts.KindPort {
			before = append(before, thing)
		}
	}
	for _, thing := range s.reached {
		if thing.Host == killed && thing.Kind == hosts.KindFile || thing.Host == coordinatorHost && killed != coordinatorHost || thing.Kind == hosts.KindPort && thing.Host == "" {
			before = append(before, thing)
		}
	}
	s.net.CheckNothingLeft(t, before)
}

// checkPeerHolds compares a peer, which the coordinator has come back to already, with what it held when it waited first: it
// may have another executor, but not more.
func (s *killScene) checkPeerHolds(t testing.TB, host string) {
	t.Helper()
	s.coordinator.Await(t, hosts.IsMessage("reached a peer").With("node", host))
	count := func(all hosts.Holdings) map[hosts.Kind]int {
		n := map[hosts.Kind]int{}
		for _, thing := range all {
			if thing.Host == host {
				n[thing.Kind]++
			}
		}
		return n
	}
	if before, after := count(s.waiting), count(s.net.Snapshot(t)); !maps.Equal(before, after) {
		t.Errorf("%s held %v, and after the loss of the other %v", host, before, after)
	}
}

// victimHost is the host whose process was killed; empty where none was.
func (s *killScene) victimHost() string {
	switch {
	case s.cell.Signal != syscall.SIGKILL || s.cell.Victim == hosts.ExecutorProcess:
		return ""
	case s.cell.Victim == hosts.CoordinatorHost:
		return coordinatorHost
	}
	return s.peerHost(s.victim()).Name
}

// comesBack tells whether the cluster does so by itself, at once: both hosts are there.
func (s *killScene) comesBack() bool {
	return s.serves() && s.cell.Victim == hosts.ExecutorProcess
}

func (s *killScene) Recover(t testing.TB) {
	switch {
	case s.cell.Victim == hosts.CoordinatorHost && s.cell.Signal == syscall.SIGSTOP:
		s.coordinator.Signal(t, syscall.SIGCONT)
		if s.stream != nil {
			s.checkStream(t, "", "")
		}
		if s.answer != nil {
			if got := <-s.answer; !strings.HasPrefix(got, "503 ") {
				t.Errorf("the client of a coordinator that stood still got %s", got)
			}
		}
	case s.cell.Victim == hosts.StageHost && s.cell.Signal == syscall.SIGSTOP:
		s.peers[s.victim()].Signal(t, syscall.SIGCONT)
		s.peers[s.victim()].Await(t, isWaiting)
	case s.cell.Victim == hosts.StageHost:
		s.startPeer(s.victim()).Await(t, isWaiting)
	}
	if s.cell.Phase == hosts.Waiting {
		s.startPeer(1).Await(t, isWaiting)
	}
	s.recoverCoordinator(t)
	if got := s.server.choices("x"); got != s.want {
		t.Errorf("after the next bring-up\n%s\none process:\n%s", got, s.want)
	}
}

// recoverCoordinator brings the cluster up again, where the coordinator doesn't by itself.
func (s *killScene) recoverCoordinator(t testing.TB) {
	gone := s.cell.Victim == hosts.CoordinatorHost && s.cell.Signal == syscall.SIGKILL
	switch {
	case !gone && s.serves():
		s.coordinator.Await(t, hosts.IsMessage("the pipeline is back"))
	case !gone && (s.cell.Phase == hosts.Waiting || s.spare()):
		s.server = s.ready()
	default:
		if code := s.coordinator.Exit(t); code == 0 && s.cell.Phase != hosts.Drain {
			t.Error("a bring-up that failed ends with exit code 0")
		}
		s.startCoordinator()
		s.server = s.ready()
	}
}

func (s *killScene) End(testing.TB) { s.stop() }
