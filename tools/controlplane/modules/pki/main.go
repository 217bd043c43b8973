// Command pki makes the certificates of a short-lived control plane.
//
//	pki init DIR              ca.crt ca.key, apiserver.crt apiserver.key, sa.key sa.pub
//	pki client DIR FILE USER [GROUP...]
//	                          FILE.crt and FILE.key in DIR: a client certificate, signed by DIR's
//	                          authority, that Kubernetes reads as user USER in the groups GROUP
//
// Everything is P-256. Private keys are written with mode 0600. Certificates start an hour in the
// past, so that a clock that is set back during a test does not make them invalid, and last for
// thirty days, which outlives any control plane that should be made with them.
package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

const (
	backdate = time.Hour
	lifetime = 30 * 24 * time.Hour
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pki:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "init":
		return initialise(args[1])
	case len(args) >= 4 && args[0] == "client":
		return client(args[1], args[2], pkix.Name{CommonName: args[3], Organization: args[4:]})
	}
	return errors.New("usage: pki init DIR | pki client DIR FILE USER [GROUP...]")
}

// initialise makes the authority, the API server's certificate and the key that signs
// service account tokens.
func initialise(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	caKey, err := newKey(dir, "ca.key")
	if err != nil {
		return err
	}
	authority, err := template(pkix.Name{CommonName: "control plane authority"})
	if err != nil {
		return err
	}
	authority.IsCA = true
	authority.BasicConstraintsValid = true
	authority.KeyUsage |= x509.KeyUsageCertSign
	if err := issue(dir, "ca.crt", authority, authority, caKey, caKey); err != nil {
		return err
	}

	serving, err := template(pkix.Name{CommonName: "kube-apiserver"})
	if err != nil {
		return err
	}
	serving.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	serving.DNSNames = []string{
		"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local",
	}
	serving.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.IPv4(10, 0, 0, 1)}
	servingKey, err := newKey(dir, "apiserver.key")
	if err != nil {
		return err
	}
	if err := issue(dir, "apiserver.crt", serving, authority, servingKey, caKey); err != nil {
		return err
	}

	tokenKey, err := newKey(dir, "sa.key")
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(&tokenKey.PublicKey)
	if err != nil {
		return err
	}
	return writePEM(filepath.Join(dir, "sa.pub"), "PUBLIC KEY", public, 0o644)
}

// client signs a certificate for one user with the authority that initialise left in dir.
func client(dir, file string, subject pkix.Name) error {
	authority, caKey, err := readAuthority(dir)
	if err != nil {
		return err
	}
	wanted, err := template(subject)
	if err != nil {
		return err
	}
	wanted.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	key, err := newKey(dir, file+".key")
	if err != nil {
		return err
	}
	return issue(dir, file+".crt", wanted, authority, key, caKey)
}

func readAuthority(dir string) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	der, err := readPEM(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, nil, err
	}
	authority, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, nil, err
	}
	if der, err = readPEM(filepath.Join(dir, "ca.key")); err != nil {
		return nil, nil, err
	}
	key, err := x509.ParseECPrivateKey(der)
	return authority, key, err
}

func template(subject pkix.Name) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      subject,
		NotBefore:    now.Add(-backdate),
		NotAfter:     now.Add(lifetime),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}, nil
}

func newKey(dir, file string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(filepath.Join(dir, file), "EC PRIVATE KEY", der, 0o600)
}

func issue(dir, file string, wanted, authority *x509.Certificate, key, signer *ecdsa.PrivateKey) error {
	der, err := x509.CreateCertificate(rand.Reader, wanted, authority, &key.PublicKey, signer)
	if err != nil {
		return err
	}
	return writePEM(filepath.Join(dir, file), "CERTIFICATE", der, 0o644)
}

func writePEM(path, kind string, der []byte, mode os.FileMode) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode)
}

func readPEM(path string) ([]byte, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(raw)
	if block == nil {
		return nil, fmt.Errorf("%s holds no PEM block", path)
	}
	return block.Bytes, nil
}
