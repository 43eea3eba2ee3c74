// Package hosts owns logical hosts for tests of whole clusters: real processes on machines that a test makes by itself.
//
// A Network is made for one test and vanishes with it:
//
//	net := hosts.New(t, "coordinator", "left", "right")
//	left := net.Host("left")
//	peer := left.Start(t, hosts.Command{Path: server, Args: []string{"--pp-peer", "--cluster-control-addr", left.LAN(19001), "--log-format", "json", …}})
//	peer.Await(t, hosts.Says("waiting"))           // a line of its log, past or to come
//	idle := net.Snapshot(t)                        // what the processes hold now
//	…
//	struck := peer.Signal(t, syscall.SIGKILL)
//	lost := coordinator.Await(t, hosts.Says("stage lost").With("stage", 0))
//	if lost.Logged.Sub(struck) > hosts.ClosedLimit { … }
//	net.CheckNothingLeft(t, idle)                  // processes, ports, shared memory, temporary files beyond those of then
//
// Each host is a network namespace with two interfaces. eth0 lies on a bridge with those of all others: broadcast works
// there, and Unplug pulls its cable. wire0 is carried packet by packet by this package, see Wire: with delay, jitter, loss, a
// bandwidth, or not at all. A process started on a host has its own TMPDIR, HOME and working folder, and /dev/shm is the host's own.
// Nothing of this is visible outside, and the hosts and what was started on them end with the test's process, however it ends.
//
// Making namespaces takes CAP_SYS_ADMIN and CAP_NET_ADMIN (root, `go test -exec sudo`, or `unshare -Ur go test`), iproute2 and
// /dev/net/tun. Without the rights New skips the test, unless MLXCEL_TEST_HOSTS=required forbids that. Loopback makes hosts that need
// nothing: addresses of 127.0.0.0/8 in place of namespaces, with the same methods, except that there is no wire and no cable.
//
// Phases are reached by Await, never by sleeping. A process is held in a phase by stopping another one (Process.Signal with
// SIGSTOP) or by cutting a wire. Matrix and Scene drive a kill matrix.
package hosts
