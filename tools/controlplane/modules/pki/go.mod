// The certificates of a control plane that lives for minutes. Standard library only.
module controlplane/pki

go 1.25
