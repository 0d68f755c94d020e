//! Validation of sysctls that plugins set: only sysctls of namespaces that belong to the pod. Pure.

use coracle_proto::cri::PodSandboxConfig;
use coracle_proto::nri::ContainerAdjustment;

use crate::error::Error;
use crate::namespaces;
use crate::sandbox::sysctls::{self, OwnNamespaces};

/// Refuses sysctls that affect more than the pod.
pub(super) fn check(adjustment: &ContainerAdjustment, pod: &PodSandboxConfig) -> Result<(), Error> {
    let linux = adjustment.linux.as_ref();
    let own = OwnNamespaces { network: namespaces::own_network(pod), ipc: namespaces::own_ipc(pod) };
    // A removal has no effect: containers have no sysctls of their own.
    for name in linux.iter().flat_map(|linux| linux.sysctl.keys()).filter(|name| !name.starts_with('-')) {
        sysctls::check(name, own)
            .map_err(|why| Error::invalid("NRI", format!("NRI adjustment of sysctl: {why}")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri;
    use coracle_proto::nri::LinuxContainerAdjustment;

    use super::*;

    fn adjustment(name: &str) -> ContainerAdjustment {
        let sysctl = [(name.to_owned(), "1".to_owned())].into();
        let linux = LinuxContainerAdjustment { sysctl, ..Default::default() };
        ContainerAdjustment { linux: Some(linux), ..Default::default() }
    }

    #[test]
    fn a_sysctl_must_belong_to_the_pod() {
        let pod = PodSandboxConfig::default();
        for name in ["net.ipv4.ip_default_ttl", "kernel.shmmax", "fs.mqueue.msg_max", "net/ipv4/x", "-vm.any"]
        {
            check(&adjustment(name), &pod).expect(name);
        }
        for name in
            ["vm.swappiness", "kernel.hostname", "netx", "net/../vm/swappiness", "kernel.shm/../panic"]
        {
            assert!(check(&adjustment(name), &pod).is_err(), "{name}");
        }
        let mut host = PodSandboxConfig::default();
        let options = cri::NamespaceOption { network: cri::NamespaceMode::Node.into(), ..Default::default() };
        let security = host.linux.get_or_insert_default().security_context.get_or_insert_default();
        security.namespace_options = Some(options);
        assert!(check(&adjustment("net.ipv4.ip_default_ttl"), &host).is_err());
    }
}
