//! Services of type ExternalName, for calls of the API server itself: webhooks and aggregated servers.
//!
//! As upstream, the external name is used with the port of the reference. Source: `ResolveCluster` of
//! `k8s.io/apiserver/pkg/util/proxy`. Unlike upstream, the rules of endpoints apply to the addresses of the name.
//! Otherwise the author of a Service could make the API server call itself or a service of its machine.

use coracle_kinds::kind::by_resource;
use tokio::net::TcpStream;

use crate::{
    cache::Cache,
    error::{ApiError, Result},
    resolver,
    target::{CONNECT_TIMEOUT, Endpoint},
};

/// The external name of a service. `None` if the service does not exist or has another type.
pub(crate) fn of(cache: &Cache, namespace: &str, name: &str) -> Option<String> {
    let services = by_resource("", "v1", "services")?;
    let service = cache.get(services, namespace, name)?.value();
    let spec = &service["spec"];
    (spec["type"] == "ExternalName").then(|| spec["externalName"].as_str().unwrap_or_default().to_owned())
}

/// Connects to the first address of a name that accepts the connection.
///
/// # Errors
/// The name has no address to which requests may be sent, or no address accepts the connection.
pub(crate) async fn connect(host: &str, port: u16) -> Result<(Endpoint, TcpStream)> {
    let mut last = None;
    for endpoint in resolve(host, port).await? {
        match endpoint.connect().await {
            Ok(stream) => return Ok((endpoint, stream)),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| failed(host, &"the name has no address")))
}

/// The addresses of a name to which requests may be sent.
async fn resolve(host: &str, port: u16) -> Result<Vec<Endpoint>> {
    let found = tokio::time::timeout(CONNECT_TIMEOUT, resolver::resolve(host, port)).await;
    let found = found.map_err(|elapsed| failed(host, &elapsed))?.map_err(|error| failed(host, &error))?;
    let (mut allowed, mut refused) = (Vec::new(), None);
    for address in found {
        match Endpoint::of(&address.ip().to_string(), port) {
            Ok(endpoint) => allowed.push(endpoint),
            Err(error) => refused = Some(error),
        }
    }
    match refused {
        Some(error) if allowed.is_empty() => Err(error),
        _ => Ok(allowed),
    }
}

fn failed(host: &str, cause: &dyn std::fmt::Display) -> ApiError {
    ApiError::unavailable(format!("error trying to reach service: lookup {host}: {cause}"))
}

#[cfg(test)]
mod tests {
    use coracle_store::Commit;
    use serde_json::{Value, json};

    use super::*;
    use crate::cache::{encode, key_of};

    #[test]
    fn only_a_service_of_type_external_name_has_a_name() {
        let cache = Cache::new(1);
        let kind = by_resource("", "v1", "services").unwrap();
        let specs = [
            ("far", json!({"type": "ExternalName", "externalName": "hook.example"})),
            ("near", json!({"type": "ClusterIP", "externalName": "hook.example"})),
        ];
        for (revision, (name, spec)) in (2..).zip(specs) {
            let service: Value = json!({"metadata": {"name": name, "namespace": "n"}, "spec": spec});
            let (key, value) = (key_of(kind, "n", name).into(), Some(encode(kind, &service)));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
        }
        assert_eq!(of(&cache, "n", "far").as_deref(), Some("hook.example"));
        assert_eq!((of(&cache, "n", "near"), of(&cache, "n", "none")), (None, None));
    }

    #[tokio::test]
    async fn a_name_never_leads_to_this_machine() {
        let found = resolve("10.1.2.3", 8443).await.unwrap();
        assert_eq!(found.iter().map(Endpoint::to_string).collect::<Vec<_>>(), ["10.1.2.3:8443"]);
        for host in ["127.0.0.1", "169.254.169.254", "0.0.0.0", "localhost"] {
            assert_eq!(connect(host, 443).await.unwrap_err().message, "address not allowed", "{host}");
        }
    }
}
