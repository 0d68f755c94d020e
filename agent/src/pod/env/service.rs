//! Service variables, in the form of Docker's links.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, ServicePort};

/// Variables of the API server's service, and with `links` of the namespace's other services.
pub(super) fn environment(
    services: &[Arc<Service>],
    namespace: &str,
    links: bool,
) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    for service in services {
        let (ns, name) = (service.metadata.namespace.as_deref(), service.metadata.name.as_deref());
        let master = ns == Some("default") && name == Some("kubernetes");
        if let Some(name) = name.filter(|_| master || (links && ns == Some(namespace))) {
            one(service, name, &mut env);
        }
    }
    env
}

fn one(service: &Service, name: &str, env: &mut BTreeMap<String, String>) {
    let Some(spec) = &service.spec else { return };
    let Some(ip) = spec.cluster_ip.as_deref().filter(|ip| !ip.is_empty() && *ip != "None") else { return };
    let ports = spec.ports.as_deref().unwrap_or_default();
    let Some(first) = ports.first() else { return };
    let prefix = variable(name);
    env.insert(format!("{prefix}_SERVICE_HOST"), ip.to_owned());
    env.insert(format!("{prefix}_SERVICE_PORT"), first.port.to_string());
    env.insert(format!("{prefix}_PORT"), url(first, ip));
    for port in ports {
        if let Some(port_name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            env.insert(format!("{prefix}_SERVICE_PORT_{}", variable(port_name)), port.port.to_string());
        }
        let link = format!("{prefix}_PORT_{}_{}", port.port, protocol(port));
        env.insert(link.clone(), url(port, ip));
        env.insert(format!("{link}_PROTO"), protocol(port).to_lowercase());
        env.insert(format!("{link}_PORT"), port.port.to_string());
        env.insert(format!("{link}_ADDR"), ip.to_owned());
    }
}

fn variable(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

fn protocol(port: &ServicePort) -> &str {
    port.protocol.as_deref().unwrap_or("TCP")
}

fn url(port: &ServicePort, ip: &str) -> String {
    let host = if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() };
    format!("{}://{host}:{}", protocol(port).to_lowercase(), port.port)
}
