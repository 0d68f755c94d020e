//! Exec, Attach, PortForward: validates the request and returns a streaming URL with a token.

use coracle_proto::cri;

use super::StreamService;
use super::token::StreamRequest;
use super::websocket::MAX_PORTS;
use crate::error::Error;

impl StreamService {
    /// URL for an exec stream.
    pub(crate) fn exec_open(&self, request: cri::ExecRequest) -> Result<cri::ExecResponse, Error> {
        self.tables.running(&request.container_id)?;
        if request.cmd.is_empty() {
            return Err(Error::invalid("cmd", "is empty"));
        }
        if request.tty && request.stderr {
            return Err(Error::invalid("stderr", "must be false with tty"));
        }
        if !request.stdin && !request.stdout && !request.stderr {
            return Err(Error::invalid("stdin, stdout, stderr", "at least one must be true"));
        }
        Ok(cri::ExecResponse { url: self.url_for(StreamRequest::Exec(request)) })
    }

    /// URL for an attach stream.
    pub(crate) fn attach_open(&self, request: cri::AttachRequest) -> Result<cri::AttachResponse, Error> {
        self.tables.running(&request.container_id)?;
        if request.tty && request.stderr {
            return Err(Error::invalid("stderr", "must be false with tty"));
        }
        if !request.stdin && !request.stdout && !request.stderr {
            return Err(Error::invalid("stdin, stdout, stderr", "at least one must be true"));
        }
        Ok(cri::AttachResponse { url: self.url_for(StreamRequest::Attach(request)) })
    }

    /// URL for a port-forward stream.
    pub(crate) fn port_forward_open(
        &self,
        request: cri::PortForwardRequest,
    ) -> Result<cri::PortForwardResponse, Error> {
        let id = &request.pod_sandbox_id;
        self.tables.sandbox(id)?.shim()?;
        check_ports(&request.port).map_err(|why| Error::invalid("port", why))?;
        Ok(cri::PortForwardResponse { url: self.url_for(StreamRequest::PortForward(request)) })
    }

    fn url_for(&self, request: StreamRequest) -> String {
        let verb = request.verb();
        format!("{}/{verb}/{}", self.url, self.tokens.issue(request))
    }
}

/// Refuses invalid port numbers, and more ports than channels.
fn check_ports(ports: &[i32]) -> Result<(), String> {
    if ports.len() > MAX_PORTS {
        return Err(format!("has {} ports; the maximum is {MAX_PORTS}", ports.len()));
    }
    match ports.iter().find(|port| !(1..=65_535).contains(*port)) {
        Some(port) => Err(format!("{port} is not a port number")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PORTS, check_ports};

    #[test]
    fn invalid_and_too_many_ports_are_refused() {
        assert_eq!(check_ports(&[]), Ok(()));
        assert_eq!(check_ports(&[1, 65_535]), Ok(()));
        assert_eq!(check_ports(&vec![80; MAX_PORTS]), Ok(()));
        for wrong in [&[80, 0][..], &[-1], &[65_536], &vec![80; MAX_PORTS + 1]] {
            assert!(check_ports(wrong).is_err(), "{wrong:?}");
        }
    }
}
