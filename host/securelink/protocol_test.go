package securelink

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/internal/tcptest"
)

// hexBytes is written as hex digits.
type hexBytes []byte

func (h *hexBytes) UnmarshalText(text []byte) (err error) {
	*h, err = hex.DecodeString(string(text))
	return err
}

// vectors is a whole conversation with fixed random numbers, made by scripts/protocol/link.py.
type vectors struct {
	Secret     hexBytes `json:"secret"`
	Purpose    string   `json:"purpose"`
	PurposeKey hexBytes `json:"purpose_key"`
	Ends       struct{ Client, Server vectorEnd }
	Proof      hexBytes `json:"client_proof"`
	Verdicts   []struct {
		Code RefusalCode `json:"code"`
		Text string      `json:"text"`
		Wire hexBytes    `json:"wire"`
	}
	Rekey      uint64 `json:"rekey_every"`
	Directions struct {
		ToServer vectorDirection `json:"client_to_server"`
		ToClient vectorDirection `json:"server_to_client"`
	}
}

type vectorEnd struct {
	Identity struct {
		Role    Role   `json:"role"`
		Node    string `json:"node"`
		Cluster string `json:"cluster"`
		Version string `json:"version"`
	}
	Nonce, Private, Hello hexBytes
}

type vectorDirection struct {
	Records []struct{ Text, Wire hexBytes }
}

func readVectors(t *testing.T) *vectors {
	raw, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	v := &vectors{}
	if err := json.Unmarshal(raw, v); err != nil {
		t.Fatal(err)
	}
	return v
}

func (v *vectors) config(t *testing.T, end vectorEnd) Config {
	id := end.Identity
	return Config{Secret: testSecret(t, string(v.Secret)), Self: Identity{Role: id.Role, NodeID: id.Node, Cluster: id.Cluster, Version: id.Version},
		Rand: bytes.NewReader(append(append([]byte{}, end.Nonce...), end.Private...)), rekeyEvery: v.Rekey}
}

// recorder keeps what is written.
type recorder struct {
	net.Conn
	mu   sync.Mutex
	sent []byte
}

func (r *recorder) Write(p []byte) (int, error) {
	r.mu.Lock()
	r.sent = append(r.sent, p...)
	r.mu.Unlock()
	return r.Conn.Write(p)
}

func (r *recorder) take() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	sent := r.sent
	r.sent = nil
	return sent
}

// Both ends send exactly the bytes of the vectors, through every verdict and over a change of keys.
func TestVectors(t *testing.T) {
	v := readVectors(t)
	if got := testSecret(t, string(v.Secret)).Key(v.Purpose); !bytes.Equal(got, v.PurposeKey) {
		t.Errorf("key for %s: got %x, want %x", v.Purpose, got, v.PurposeKey)
	}
	if len(v.Verdicts) == 0 || len(v.Directions.ToServer.Records) <= int(v.Rekey) {
		t.Fatal("the vectors leave out what matters")
	}
	for _, verdict := range v.Verdicts {
		a, b := tcptest.Pair(t)
		client, server := &recorder{Conn: a}, &recorder{Conn: b}
		c, s, clientErr, serverErr := shakeHands(t, client, server, v.config(t, v.Ends.Client), v.config(t, v.Ends.Server),
			func(Identity) *Refusal {
				if verdict.Code == 0 {
					return nil
				}
				return &Refusal{verdict.Code, verdict.Text}
			})
		wantSent(t, "client", client.take(), v.Ends.Client.Hello, v.Proof)
		wantSent(t, "server", server.take(), v.Ends.Server.Hello, verdict.Wire)
		if verdict.Code != 0 {
			refused, ok := errors.AsType[*RefusedError](clientErr)
			if !ok || refused.Refusal != (Refusal{verdict.Code, verdict.Text}) {
				t.Errorf("verdict %d: client got %v", verdict.Code, clientErr)
			}
			continue
		}
		if clientErr != nil || serverErr != nil {
			t.Fatal(clientErr, serverErr)
		}
		playRecords(t, c, s, client, v.Directions.ToServer)
		playRecords(t, s, c, server, v.Directions.ToClient)
	}
}

func wantSent(t *testing.T, who string, got []byte, want ...hexBytes) {
	t.Helper()
	var all []byte
	for _, w := range want {
		all = append(all, w...)
	}
	if !bytes.Equal(got, all) {
		t.Errorf("%s sent\n%x, want\n%x", who, got, all)
	}
}

func playRecords(t *testing.T, from, to *Conn, wire *recorder, d vectorDirection) {
	t.Helper()
	buf := make([]byte, 1000)
	for i, record := range d.Records {
		send := func() error { _, err := from.Write(record.Text); return err }
		if len(record.Text) == 0 {
			send = from.CloseWrite
		}
		if err := send(); err != nil {
			t.Fatal(i, err)
		}
		wantSent(t, "record", wire.take(), record.Wire)
		n, err := to.Read(buf)
		if !bytes.Equal(buf[:n], record.Text) || (err == io.EOF) != (len(record.Text) == 0) {
			t.Fatalf("record %d: read %x, %v", i, buf[:n], err)
		}
	}
}

// python returns a command of the independent program, or skips where Python or its cryptography is missing.
func python(t *testing.T, secret string, args ...string) *exec.Cmd {
	t.Helper()
	name := os.Getenv("PYTHON")
	if name == "" {
		name = "python3"
	}
	if out, err := exec.Command(name, "-c", "from cryptography.hazmat.primitives.ciphers.aead import AESGCM").CombinedOutput(); err != nil {
		t.Skipf("needs Python with the packages of scripts/protocol/requirements.txt: %v: %s", err, out)
	}
	cmd := exec.CommandContext(t.Context(), name, append([]string{"-B", "../../scripts/protocol/link.py"}, args...)...)
	cmd.Env = append(os.Environ(), "MLXCEL_CLUSTER_SECRET="+secret)
	cmd.Stderr = os.Stderr
	return cmd
}

type pythonSays struct {
	Error string
	Peer  struct{ Node string }
}

const (
	sharedSecret = "0123456789abcdef0123456789abcdef" // testConfig's
	otherSecret  = "another secret of sufficient length"
)

// The program writes the vectors that are committed.
func TestVectorsAreThePrograms(t *testing.T) {
	path := t.TempDir() + "/vectors.json"
	if err := python(t, "", "vectors", path).Run(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("testdata/vectors.json is not what scripts/protocol/link.py vectors writes")
	}
}

func TestPythonDials(t *testing.T) {
	refuse := func(Identity) *Refusal { return &Refusal{RefusedCluster, "“a” here"} }
	for name, c := range map[string]struct {
		secret string
		decide func(Identity) *Refusal
		says   string // Python's error
		err    func(error) bool
	}{
		"talks":        {sharedSecret, nil, "", func(err error) bool { return err == nil }},
		"wrong secret": {otherSecret, nil, "secret differs", func(err error) bool { return errors.Is(err, ErrSecret) }},
		"refused":      {sharedSecret, refuse, "refused 3: “a” here", isRefusal},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			l.(*net.TCPListener).SetDeadline(time.Now().Add(time.Minute)) // in case Python never dials
			cmd := python(t, c.secret, "dial", "--rekey", "3", l.Addr().String())
			var out bytes.Buffer
			cmd.Stdout = &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			raw, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			cfg := pythonsPeer(t)
			conn, err := Server(t.Context(), raw, cfg, c.decide)
			if !c.err(err) {
				t.Errorf("got %v", err)
			}
			if conn != nil {
				if _, err := io.Copy(conn, conn); err != nil {
					t.Error(err)
				}
				conn.Close()
			}
			cmd.Wait()
			wantPython(t, out.Bytes(), c.says)
		})
	}
}

func TestPythonServes(t *testing.T) {
	for name, c := range map[string]struct {
		secret string
		args   []string
		says   string
		err    func(error) bool
	}{
		"talks":        {sharedSecret, nil, "", func(err error) bool { return err == nil }},
		"wrong secret": {otherSecret, nil, "secret differs", func(err error) bool { return errors.Is(err, ErrSecret) }},
		"busy":         {sharedSecret, []string{"--refuse", "1", "--text", "another has it"}, "refused it", isRefusal},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := python(t, c.secret, append([]string{"serve", "--rekey", "3"}, c.args...)...)
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			out := bufio.NewReader(stdout)
			port, err := out.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			raw, err := net.Dial("tcp", "127.0.0.1:"+strings.TrimSpace(port))
			if err != nil {
				t.Fatal(err)
			}
			conn, err := Client(t.Context(), raw, pythonsPeer(t))
			if !c.err(err) {
				t.Errorf("got %v", err)
			}
			if conn != nil {
				talk(t, conn)
			}
			last, _ := io.ReadAll(out)
			cmd.Wait()
			wantPython(t, last, c.says)
		})
	}
}

func pythonsPeer(t *testing.T) Config {
	cfg := testConfig(t, RoleStage, "go")
	cfg.rekeyEvery = 3
	cfg.HandshakeTimeout = time.Minute // Python starts slowly on a busy machine
	return cfg
}

func isRefusal(err error) bool {
	_, ok := errors.AsType[*RefusedError](err)
	return ok
}

// talk sends messages of all kinds of sizes and expects each back.
func talk(t *testing.T, conn *Conn) {
	t.Helper()
	if conn.Peer().NodeID != "python" {
		t.Errorf("the peer is %+v", conn.Peer())
	}
	for _, n := range []int{1, 100, 8192, maxRecordText, maxRecordText + 1, 300_000} {
		want, got := bytes.Repeat([]byte{byte(n), 7}, n), make([]byte, 2*n)
		var wg sync.WaitGroup
		wg.Go(func() { conn.WriteBuffers(want[:n], want[n:]) })
		if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes: %v", n, err)
		}
		wg.Wait()
	}
	if err := conn.CloseWrite(); err != nil {
		t.Error(err)
	}
	if n, err := conn.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read %d bytes, %v", n, err)
	}
	conn.Close()
}

func wantPython(t *testing.T, out []byte, wantErr string) {
	t.Helper()
	var says pythonSays
	if err := json.Unmarshal(out, &says); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if says.Error != wantErr || wantErr == "" && says.Peer.Node != "go" {
		t.Errorf("Python says %s", out)
	}
}
