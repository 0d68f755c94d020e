//! Addresses and node ports of services, under concurrent requests.

use std::collections::HashSet;

use super::*;

const SERVICES: &str = "/api/v1/namespaces/default/services";

fn service(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": spec})
}

fn external() -> Value {
    json!({"type": "ExternalName", "externalName": "example.com"})
}

async fn spec_of(fixture: &Fixture, name: &str) -> Value {
    fixture.get(&format!("{SERVICES}/{name}")).await.body["spec"].clone()
}

/// Updates services at the same time, all with this change, and returns how many succeeded.
async fn update_all(fixture: &Fixture, count: usize, change: &Value) -> usize {
    let one = async |n: usize| fixture.merge(&format!("{SERVICES}/s{n}"), json!({"spec": change})).await.code;
    let codes = futures::future::join_all((0..count).map(one)).await;
    codes.into_iter().filter(|code| *code == 200).count()
}

#[tokio::test]
async fn concurrent_updates_never_share_an_address_or_a_node_port() {
    let fixture = Fixture::new().await;
    for n in 0..20 {
        let made = fixture.post(SERVICES, service(&format!("s{n}"), external())).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let ports = json!([{"port": 80, "nodePort": 30080}]);
    let fixed = json!({"type": "NodePort", "externalName": null, "clusterIP": "10.43.0.77", "ports": ports});
    assert_eq!(update_all(&fixture, 20, &fixed).await, 1, "several services got one address");
    let any = json!({"type": "NodePort", "externalName": null, "ports": [{"port": 80}]});
    assert_eq!(update_all(&fixture, 20, &any).await, 20);
    let (mut addresses, mut node_ports) = (HashSet::new(), HashSet::new());
    for n in 0..20 {
        let spec = spec_of(&fixture, &format!("s{n}")).await;
        addresses.insert(spec["clusterIP"].to_string());
        node_ports.insert(spec["ports"][0]["nodePort"].to_string());
    }
    assert_eq!((addresses.len(), node_ports.len()), (20, 20));
}

#[tokio::test]
async fn a_client_that_disconnects_does_not_give_its_address_to_another_service() {
    let fixture = Fixture::new().await;
    for n in 0..40 {
        let spec = json!({"clusterIP": format!("10.43.1.{n}"), "ports": [{"port": 80}]});
        let mut first = Box::pin(fixture.post(SERVICES, service(&format!("first-{n}"), spec.clone())));
        // Some polls on the way to the commit, and then the connection is gone.
        for _ in 0..n % 8 {
            if futures::poll!(first.as_mut()).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(first);
        fixture.post(SERVICES, service(&format!("second-{n}"), spec)).await;
    }
    let list = fixture.get(SERVICES).await.body;
    let addresses: Vec<_> =
        list["items"].as_array().unwrap().iter().map(|item| item["spec"]["clusterIP"].to_string()).collect();
    assert!(addresses.len() >= 40);
    let distinct: HashSet<_> = addresses.iter().collect();
    assert_eq!(distinct.len(), addresses.len(), "two services have one address: {addresses:?}");
}

#[tokio::test]
async fn a_full_store_is_an_internal_error_with_the_reason() {
    let error =
        crate::error::ApiError::from(coracle_store::Error::Full { path: "/var/lib/coracle/store".into() });
    let status = error.status();
    assert_eq!((status["code"].as_u64(), status["reason"].as_str()), (Some(500), Some("InternalError")));
    assert!(status["message"].as_str().unwrap().contains("database space exceeded"), "{status}");
}
