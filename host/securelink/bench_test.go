package securelink

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/mlxcel/mlxcel/host/internal/tcptest"
)

// BenchmarkOneWay takes turns between the transports within each iteration, so that whatever else the machine does
// hits all of them alike. 8 KiB is one token's activation: the time is half of an echo's. 8 MiB is a chunk of a long
// prompt: the time runs until the receiver's answer of one byte has come.
func BenchmarkOneWay(b *testing.B) {
	b.Run("8KiB", func(b *testing.B) { compare(b, 8<<10, 8<<10, 2) })
	b.Run("8MiB", func(b *testing.B) { compare(b, 8<<20, 1, 1) })
}

func compare(b *testing.B, size, answer, ways int) {
	names := []string{"plain", "securelink", "tls"}
	clients := []net.Conn{plainEcho(b, size, answer), secureEcho(b, size, answer), tlsEcho(b, size, answer)}
	message, reply := make([]byte, size), make([]byte, answer)
	times := make([][]time.Duration, len(clients))
	turn := func(i int) time.Duration {
		start := time.Now()
		if _, err := clients[i].Write(message); err != nil {
			b.Fatal(err)
		}
		if _, err := io.ReadFull(clients[i], reply); err != nil {
			b.Fatal(err)
		}
		return time.Since(start) / time.Duration(ways)
	}
	for range 20 { // grown windows and buffers
		for i := range clients {
			turn(i)
		}
	}
	b.SetBytes(int64(size))
	for b.Loop() {
		for i := range clients {
			times[i] = append(times[i], turn(i))
		}
	}
	medians := make([]float64, len(clients))
	for i, name := range names {
		slices.Sort(times[i])
		medians[i] = float64(times[i][len(times[i])/2]) / 1e3
		b.ReportMetric(medians[i], name+"-p50-µs")
		b.ReportMetric(float64(times[i][len(times[i])*99/100])/1e3, name+"-p99-µs")
	}
	b.ReportMetric(medians[1]/medians[0], "securelink/plain-p50")
	b.ReportMetric(medians[2]/medians[1], "securelink/tls-throughput")
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(0, "MB/s")
}

// echo answers each message of the given size with the last bytes of it.
func echo(c net.Conn, size, answer int) {
	message := make([]byte, size)
	for {
		if _, err := io.ReadFull(c, message); err != nil {
			return
		}
		if _, err := c.Write(message[size-answer:]); err != nil {
			return
		}
	}
}

func plainEcho(b *testing.B, size, answer int) net.Conn {
	client, server := tcptest.Pair(b)
	go echo(server, size, answer)
	return client
}

func secureEcho(b *testing.B, size, answer int) net.Conn {
	client, server := securePair(b)
	go echo(server, size, answer)
	return client
}

func tlsEcho(b *testing.B, size, answer int) net.Conn {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"bench"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		b.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		b.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	a, z := tcptest.Pair(b)
	client := tls.Client(a, &tls.Config{RootCAs: roots, ServerName: "bench"})
	go echo(tls.Server(z, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}), size, answer)
	if err := client.Handshake(); err != nil {
		b.Fatal(err)
	}
	return client
}
