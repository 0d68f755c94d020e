//! A signer in the process of a test, on a unix socket.
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "for tests")]

use std::sync::{Arc, Mutex, PoisonError};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _},
};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use crate::v1::{
    self,
    external_jwt_signer_server::{ExternalJwtSigner, ExternalJwtSignerServer},
};

/// The first bytes of the SubjectPublicKeyInfo of a P-256 key. The bytes of the point follow.
const P256: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 6, 7, 0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 3,
    1, 7, 3, 0x42, 0,
];

/// Behaviour of the signer. Tests change it.
#[derive(Clone)]
pub struct Behaviour {
    /// The key that signs.
    pub key_id: String,
    /// The published keys, each with its id and whether it is excluded.
    pub published: Vec<(String, bool)>,
    /// Further keys: id and SubjectPublicKeyInfo.
    pub others: Vec<(String, Vec<u8>)>,
    /// The header of tokens. Null stands for the usual header.
    pub header: Value,
    /// Whether the signer signs claims that differ from the requested claims.
    pub is_forging: bool,
    /// Whether a request to sign gets no response.
    pub hangs: bool,
    /// `refresh_hint_seconds`.
    pub refresh: i64,
    /// `max_token_expiration_seconds`.
    pub max_seconds: i64,
    /// Number of calls of `FetchKeys`.
    pub fetches: usize,
}

/// The signer. It has one key, which it publishes under each of the ids.
pub struct FakeSigner {
    key: EcdsaKeyPair,
    behaviour: Arc<Mutex<Behaviour>>,
}

impl FakeSigner {
    /// Serves a signer with the published key `a` at this path, until the runtime ends.
    #[must_use]
    pub fn serve(path: &str) -> Arc<Mutex<Behaviour>> {
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new()).unwrap();
        let key = EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &SystemRandom::new()).unwrap();
        let behaviour = Arc::new(Mutex::new(Behaviour {
            key_id: "a".to_owned(),
            published: vec![("a".to_owned(), false)],
            others: Vec::new(),
            header: Value::Null,
            is_forging: false,
            hangs: false,
            refresh: 3600,
            max_seconds: 7200,
            fetches: 0,
        }));
        let signer = Self { key, behaviour: behaviour.clone() };
        let listener = UnixListener::bind(path.replace('@', "\0")).unwrap();
        let server = tonic::transport::Server::builder().add_service(ExternalJwtSignerServer::new(signer));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        behaviour
    }

    fn behaviour(&self) -> std::sync::MutexGuard<'_, Behaviour> {
        self.behaviour.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl ExternalJwtSigner for FakeSigner {
    async fn sign(
        &self,
        request: Request<v1::SignJwtRequest>,
    ) -> Result<Response<v1::SignJwtResponse>, Status> {
        let behaviour = self.behaviour().clone();
        if behaviour.hangs {
            std::future::pending::<()>().await;
        }
        let header = match behaviour.header {
            Value::Null => json!({"alg": "ES256", "kid": behaviour.key_id, "typ": "JWT"}),
            other => other,
        };
        let header = BASE64_URL_SAFE_NO_PAD.encode(header.to_string());
        let mut signed = format!("{header}.{}", request.into_inner().claims);
        signed.extend(behaviour.is_forging.then_some('x'));
        let signature = self.key.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
        let signature = BASE64_URL_SAFE_NO_PAD.encode(signature);
        Ok(Response::new(v1::SignJwtResponse { header, signature }))
    }

    async fn fetch_keys(
        &self,
        _: Request<v1::FetchKeysRequest>,
    ) -> Result<Response<v1::FetchKeysResponse>, Status> {
        let mut behaviour = self.behaviour();
        behaviour.fetches += 1;
        let public = [&P256, self.key.public_key().as_ref()].concat();
        let own = behaviour.published.iter().map(|(id, is_excluded)| v1::Key {
            key_id: id.clone(),
            key: public.clone(),
            exclude_from_oidc_discovery: *is_excluded,
        });
        let others = behaviour.others.iter().map(|(id, key)| v1::Key {
            key_id: id.clone(),
            key: key.clone(),
            exclude_from_oidc_discovery: false,
        });
        Ok(Response::new(v1::FetchKeysResponse {
            keys: own.chain(others).collect(),
            data_timestamp: Some(v1::Timestamp { seconds: 1, nanos: 0 }),
            refresh_hint_seconds: behaviour.refresh,
        }))
    }

    async fn metadata(
        &self,
        _: Request<v1::MetadataRequest>,
    ) -> Result<Response<v1::MetadataResponse>, Status> {
        let max_token_expiration_seconds = self.behaviour().max_seconds;
        Ok(Response::new(v1::MetadataResponse { max_token_expiration_seconds }))
    }
}
