//! Service variables, in the form of Docker's links.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Service, ServicePort};

/// Variables of the API server's service and, with `links`, of the services of the namespace. A service of the
/// namespace takes precedence over the API server's if it has the same name, as in the kubelet (`getServiceEnvVarMap`).
pub(super) fn environment(
    services: &[Arc<Service>],
    namespace: &str,
    links: bool,
) -> BTreeMap<String, String> {
    let mut named: BTreeMap<&str, &Service> = BTreeMap::new();
    for service in services.iter().filter(|service| cluster_ip(service).is_some()) {
        let (ns, name) = (service.metadata.namespace.as_deref(), service.metadata.name.as_deref());
        let Some(name) = name else { continue };
        if links && ns == Some(namespace) {
            named.insert(name, service);
        } else if ns == Some("default") && name == "kubernetes" {
            named.entry(name).or_insert(service);
        }
    }
    let mut env = BTreeMap::new();
    named.into_iter().for_each(|(name, service)| add_variables(service, name, &mut env));
    env
}

fn cluster_ip(service: &Service) -> Option<&str> {
    let ip = service.spec.as_ref()?.cluster_ip.as_deref();
    ip.filter(|ip| !ip.is_empty() && *ip != "None")
}

fn add_variables(service: &Service, name: &str, env: &mut BTreeMap<String, String>) {
    let (Some(spec), Some(ip)) = (&service.spec, cluster_ip(service)) else { return };
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(namespace: &str, ip: &str, ports: &[(&str, u16)]) -> Arc<Service> {
        let ports: Vec<_> = ports.iter().map(|(name, port)| json!({"name": name, "port": port})).collect();
        let value = json!({"metadata": {"namespace": namespace, "name": "kubernetes"},
            "spec": {"clusterIP": ip, "ports": ports}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn a_service_named_kubernetes_in_the_namespace_takes_precedence() {
        let api_server = service("default", "10.0.0.1", &[("https", 443)]);
        let own = service("ns", "10.0.0.2", &[("web", 80)]);
        for services in [[api_server.clone(), own.clone()], [own, api_server.clone()]] {
            let env = environment(&services, "ns", true);
            assert_eq!(env["KUBERNETES_SERVICE_HOST"], "10.0.0.2");
            assert!(!env.contains_key("KUBERNETES_SERVICE_PORT_HTTPS"), "{env:?}");
            assert_eq!(environment(&services, "ns", false)["KUBERNETES_SERVICE_HOST"], "10.0.0.1");
        }
        let headless = service("ns", "None", &[("web", 80)]);
        assert_eq!(environment(&[api_server, headless], "ns", true)["KUBERNETES_SERVICE_HOST"], "10.0.0.1");
    }
}
