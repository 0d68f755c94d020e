//! Discovery of the cluster: its authority from `cluster-info`, verified by the hash and the token.

use base64::Engine;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use http_body_util::{BodyExt, Limited};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::config::Kubeconfig;
use kube::{Api, Client};
use ring::hmac;

use super::endpoint::{CONNECT_TIMEOUT, Endpoint};
use super::error::JoinError;
use super::request::Failure;
use super::token::{CaHash, Token};

/// Maximum size in bytes of the response, which comes from an untrusted server.
const ANSWER_MAX: usize = 1 << 20;

/// The authority (PEM) of the cluster at this address. The response comes from an untrusted server. The response is
/// accepted only if the authority has the hash and the response is signed with the token.
pub(super) async fn authority(
    endpoint: &Endpoint,
    token: &Token,
    hash: &CaHash,
) -> Result<String, JoinError> {
    let mut config = endpoint.config();
    config.accept_invalid_certs = true;
    let client = Client::try_from(config).map_err(|error| endpoint.unreachable(&error))?;
    let answer = tokio::time::timeout(CONNECT_TIMEOUT, cluster_info(&client, endpoint)).await;
    let info = answer.map_err(|_elapsed| {
        let reason = format!("no answer within {} s", CONNECT_TIMEOUT.as_secs());
        JoinError::Unreachable { server: endpoint.to_string(), reason }
    })??;
    let data = info.data.unwrap_or_default();
    let read = |key: &str| data.get(key).map(String::as_str);
    let Some(kubeconfig) = read("kubeconfig") else {
        return Err(JoinError::ClusterInfo("cluster-info has no kubeconfig".to_owned()));
    };
    let authority = authority_in(kubeconfig)?;
    let found = CaHash::of(&authority)?;
    if found != *hash {
        let (wanted, found) = (hash.to_string(), found.to_string());
        return Err(JoinError::OtherAuthority { server: endpoint.to_string(), wanted, found });
    }
    let id = token.id.clone();
    match read(&format!("jws-kubeconfig-{id}")) {
        None => Err(JoinError::UnknownToken { id }),
        Some(signature) if !is_signed(kubeconfig, signature, token) => Err(JoinError::WrongSecret { id }),
        Some(_) => Ok(authority),
    }
}

/// The config map `cluster-info`, at most 1 MiB: the server is not trusted yet.
async fn cluster_info(client: &Client, endpoint: &Endpoint) -> Result<ConfigMap, JoinError> {
    let unusable = |error: &dyn std::fmt::Display| JoinError::ClusterInfo(error.to_string());
    let request = http::Request::get("/api/v1/namespaces/kube-public/configmaps/cluster-info");
    let request = request.body(kube::client::Body::empty()).map_err(|error| unusable(&error))?;
    let answer = client.send(request).await.map_err(|error| endpoint.unreachable(&error))?;
    let (head, body) = answer.into_parts();
    let body = Limited::new(body, ANSWER_MAX).collect().await.map_err(|error| unusable(&error))?.to_bytes();
    if head.status.is_success() {
        return serde_json::from_slice(&body).map_err(|error| unusable(&error));
    }
    let status: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
    let message = status.as_ref().and_then(|status| status["message"].as_str());
    Err(unusable(&message.unwrap_or(head.status.as_str())))
}

/// Whether a node of this name exists and is Ready: then the name is in use.
pub(super) async fn has_ready_node(client: &Client, name: &str) -> Result<bool, Failure> {
    let found = Api::<Node>::all(client.clone()).get_opt(name).await;
    let node = found.map_err(|error| Failure::Api(Box::new(error)))?;
    let conditions = node.and_then(|node| node.status?.conditions).unwrap_or_default();
    Ok(conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"))
}

fn authority_in(kubeconfig: &str) -> Result<String, JoinError> {
    let wrong = |why: &str| JoinError::ClusterInfo(why.to_owned());
    let parsed =
        Kubeconfig::from_yaml(kubeconfig).map_err(|_malformed| wrong("cannot parse its kubeconfig"))?;
    let data = parsed.clusters.into_iter().find_map(|named| named.cluster?.certificate_authority_data);
    let pem =
        data.and_then(|data| BASE64_STANDARD.decode(data).ok()).and_then(|pem| String::from_utf8(pem).ok());
    pem.ok_or_else(|| wrong("its kubeconfig has no certificate-authority-data in base64"))
}

/// A detached JSON web signature (RFC 7515), HS256.
fn is_signed(content: &str, signature: &str, token: &Token) -> bool {
    let verified = || {
        let (header, tag) = signature.split_once("..")?;
        let read: serde_json::Value =
            serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(header).ok()?).ok()?;
        (read["alg"] == "HS256" && read["kid"] == token.id.as_str()).then_some(())?;
        let key = hmac::Key::new(hmac::HMAC_SHA256, token.secret.as_bytes());
        let signed = format!("{header}.{}", BASE64_URL_SAFE_NO_PAD.encode(content));
        hmac::verify(&key, signed.as_bytes(), &BASE64_URL_SAFE_NO_PAD.decode(tag).ok()?).ok()
    };
    verified().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_host_reached_by_tls() {
        for right in ["https://192.0.2.1:6443", "https://[2001:db8::1]:6443/", "https://cluster.example"] {
            assert_eq!(right.parse::<Endpoint>().unwrap().to_string(), right.trim_end_matches('/'));
        }
        for wrong in ["", "192.0.2.1:6443", "http://192.0.2.1:6443", "https://", "https://a/b", "https://a?b"]
        {
            assert!(wrong.parse::<Endpoint>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_signature_holds_for_its_content_and_its_token() {
        let signature =
            "eyJhbGciOiJIUzI1NiIsImtpZCI6ImFiY2RlZiJ9..psz1NayrXM3IaFzKZGsb5n_mBl7MjtlsZ1xE8MRmF_4";
        let token: Token = "abcdef.0123456789abcdef".parse().unwrap();
        assert!(is_signed("content", signature, &token));
        assert!(!is_signed("other", signature, &token));
        assert!(!is_signed("content", signature, &"abcdef.0123456789abcdee".parse().unwrap()));
        assert!(!is_signed("content", signature, &"abcdeg.0123456789abcdef".parse().unwrap()));
        assert!(!is_signed("content", "nonsense", &token));
    }

    #[tokio::test]
    async fn a_long_response_of_an_untrusted_server_is_not_read_whole() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            let body = kube::client::Body::from(vec![b' '; ANSWER_MAX + 1]);
            http::Response::builder().body(body)
        });
        let endpoint: Endpoint = "https://192.0.2.1:6443".parse().unwrap();
        let error = cluster_info(&Client::new(service, "default"), &endpoint).await.unwrap_err();
        assert!(matches!(&error, JoinError::ClusterInfo(why) if why.contains("limit")), "{error}");
    }
}
