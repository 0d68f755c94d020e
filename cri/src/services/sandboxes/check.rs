//! Validation of a sandbox's configuration.

use coracle_proto::cri;

use crate::error::Error;
use crate::host::Host;
use crate::namespaces;
use crate::sandbox::sysctls::OwnNamespaces;
use crate::sandbox::user_namespace::Mapping;
use crate::sandbox::{fields, sysctls};

/// Refuses a configuration that this node cannot fulfil.
pub(crate) fn check(config: &cri::PodSandboxConfig, runtime_handler: &str, host: &Host) -> Result<(), Error> {
    let Some(metadata) = &config.metadata else {
        return Err(Error::invalid("config.metadata", "is missing"));
    };
    if metadata.name.is_empty() || metadata.namespace.is_empty() || metadata.uid.is_empty() {
        return Err(Error::invalid("config.metadata", "needs name, namespace and uid"));
    }
    if config.windows.is_some() {
        return Err(Error::invalid("config.windows", "is not supported on Linux"));
    }
    if !runtime_handler.is_empty() {
        return Err(Error::invalid(
            "runtime_handler",
            format!("runtime handler {runtime_handler:?} does not exist"),
        ));
    }
    fields::check(config)?;
    check_sysctls(config)?;
    let options = namespaces::options(config);
    let mapping = Mapping::check_pod(&options)
        .map_err(|why| Error::invalid("namespace_options.userns_options", why))?;
    if mapping.is_some() && !host.kernel.user_namespaces {
        return Err(Error::Unsupported("a user namespace with idmapped mounts (Linux 5.19), on this node,"));
    }
    Ok(())
}

/// Refuses sysctls that are not namespaced.
fn check_sysctls(config: &cri::PodSandboxConfig) -> Result<(), Error> {
    let own = OwnNamespaces { network: namespaces::own_network(config), ipc: namespaces::own_ipc(config) };
    for name in config.linux.iter().flat_map(|linux| linux.sysctls.keys()) {
        sysctls::check(name, own).map_err(|why| Error::invalid("linux.sysctls", why))?;
    }
    Ok(())
}
