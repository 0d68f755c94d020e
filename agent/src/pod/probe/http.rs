//! One HTTP GET to a pod, as probes and hooks make it: any certificate is taken, and a redirect is a success.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// The most that is read of an answer.
const BODY_BYTES: usize = 10 * 1024;

/// Where to ask for what.
#[derive(Debug)]
pub(crate) struct Request {
    tls: bool,
    host: String,
    port: u16,
    path: String,
    headers: Vec<(String, String)>,
}

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    status: http::StatusCode,
}

/// Why there is no good answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error("its port has no number")]
    Port,
    #[error("cannot connect to {host}:{port}: {source}")]
    Connect { host: String, port: u16, source: std::io::Error },
    #[error("HTTP: {0}")]
    Http(#[from] hyper::Error),
    #[error("the request is not valid: {0}")]
    Request(#[from] http::Error),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error("HTTP probe failed with statuscode: {0}")]
    Status(u16),
}

impl Request {
    /// A handler's request to a container of the pod with this address.
    pub(crate) fn new(get: &HTTPGetAction, container: &Container, ip: &str) -> Result<Self, HttpError> {
        let path = get.path.as_deref().unwrap_or("/");
        Ok(Self {
            tls: get.scheme.as_deref().is_some_and(|s| s.eq_ignore_ascii_case("https")),
            host: get.host.clone().filter(|h| !h.is_empty()).unwrap_or_else(|| ip.to_owned()),
            port: super::port(&get.port, container).ok_or(HttpError::Port)?,
            path: if path.starts_with('/') { path.to_owned() } else { format!("/{path}") },
            headers: get
                .http_headers
                .iter()
                .flatten()
                .map(|header| (header.name.clone(), header.value.clone()))
                .collect(),
        })
    }

    fn build(&self) -> Result<http::Request<Empty<Bytes>>, http::Error> {
        let authority = match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        };
        let mut request = http::Request::get(&self.path);
        let has = |name: &str| self.headers.iter().any(|(n, _)| n.eq_ignore_ascii_case(name));
        for (name, default) in
            [("Host", authority.as_str()), ("User-Agent", "kube-probe/1.37"), ("Accept", "*/*")]
        {
            if !has(name) {
                request = request.header(name, default);
            }
        }
        for (name, value) in self.headers.iter().filter(|(_, value)| !value.is_empty()) {
            request = request.header(name, value);
        }
        request.header("Connection", "close").body(Empty::new())
    }
}

impl Answer {
    /// 2xx and 3xx are good.
    pub(crate) fn success(&self) -> Result<(), HttpError> {
        match self.status.as_u16() {
            200..400 => Ok(()),
            code => Err(HttpError::Status(code)),
        }
    }
}

/// Asks once.
pub(crate) async fn get(request: &Request) -> Result<Answer, HttpError> {
    let connect_error =
        |source| HttpError::Connect { host: request.host.clone(), port: request.port, source };
    let stream = TcpStream::connect((request.host.as_str(), request.port)).await.map_err(connect_error)?;
    if !request.tls {
        return exchange(stream, request).await;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
        .with_no_client_auth();
    let name = ServerName::try_from(request.host.clone()).map_err(|_invalid| {
        HttpError::Tls(rustls::Error::General("the host is no server name".to_owned()))
    })?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    exchange(connector.connect(name, stream).await.map_err(connect_error)?, request).await
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: &Request,
) -> Result<Answer, HttpError> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let response = sender.send_request(request.build()?).await?;
        let status = response.status();
        // Read to the end, so that the server does not see its answer thrown back; how much does not matter.
        let _ = Limited::new(response.into_body(), BODY_BYTES).collect().await;
        Ok(Answer { status })
    };
    tokio::pin!(exchange);
    tokio::pin!(connection);
    // The connection is driven beside the exchange and dropped with it.
    tokio::select! {
        answer = &mut exchange => answer,
        ended = &mut connection => match ended {
            Ok(()) => exchange.await,
            Err(error) => Err(error.into()),
        },
    }
}

/// A probe asks whether something answers, not who it is.
#[derive(Debug)]
struct AnyCertificate(Arc<rustls::crypto::CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
