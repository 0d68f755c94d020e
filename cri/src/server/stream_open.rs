//! Exec, Attach, PortForward: checked here, then given a token that a streaming URL ends with.
//! ReopenContainerLog.

use coracle_proto::cri;

use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::stream::{MOST_PORTS, Ticket};

impl Runtime {
    /// A URL to run a command at.
    pub(crate) fn exec_open(&self, request: cri::ExecRequest) -> Result<cri::ExecResponse, Error> {
        self.running(&request.container_id)?;
        if request.cmd.is_empty() {
            return Err(Error::invalid("cmd", "is empty"));
        }
        if request.tty && request.stderr {
            return Err(Error::invalid("stderr", "a terminal has none"));
        }
        if !request.stdin && !request.stdout && !request.stderr {
            return Err(Error::invalid("stdin, stdout, stderr", "one of them must be asked for"));
        }
        Ok(cri::ExecResponse { url: self.url(Ticket::Exec(request)) })
    }

    /// A URL to attach to a container at.
    pub(crate) fn attach_open(&self, request: cri::AttachRequest) -> Result<cri::AttachResponse, Error> {
        self.running(&request.container_id)?;
        if request.tty && request.stderr {
            return Err(Error::invalid("stderr", "a terminal has none"));
        }
        if !request.stdin && !request.stdout && !request.stderr {
            return Err(Error::invalid("stdin, stdout, stderr", "one of them must be asked for"));
        }
        Ok(cri::AttachResponse { url: self.url(Ticket::Attach(request)) })
    }

    /// A URL to reach a pod's ports at.
    pub(crate) fn port_forward_open(
        &self,
        request: cri::PortForwardRequest,
    ) -> Result<cri::PortForwardResponse, Error> {
        let id = &request.pod_sandbox_id;
        self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?.shim()?;
        check_ports(&request.port).map_err(|why| Error::invalid("port", why))?;
        Ok(cri::PortForwardResponse { url: self.url(Ticket::PortForward(request)) })
    }

    fn url(&self, ticket: Ticket) -> String {
        let verb = ticket.verb();
        format!("{}/{verb}/{}", self.inner.config.stream_url, self.inner.tokens.give(ticket))
    }

    /// Opens a container's log file anew, after the client renamed it.
    pub(crate) async fn log_reopen(
        &self,
        request: cri::ReopenContainerLogRequest,
    ) -> Result<cri::ReopenContainerLogResponse, Error> {
        let container = self.container(&request.container_id)?;
        if !matches!(container.phase(), ContainerPhase::Running { .. }) {
            return Err(Error::WrongState {
                what: "container",
                id: container.id.clone(),
                state: "not running",
            });
        }
        let shim = self.shim_of(&container)?;
        shim.reopen_log(&container.id).await.map_err(Error::shim("reopen the container's log"))?;
        coracle_fault::point("reopen.done");
        Ok(cri::ReopenContainerLogResponse {})
    }
}

/// Refuses ports that are none, and more than there are channels for.
fn check_ports(ports: &[i32]) -> Result<(), String> {
    if ports.len() > MOST_PORTS {
        return Err(format!("names {} ports, and {MOST_PORTS} can be forwarded at once", ports.len()));
    }
    match ports.iter().find(|port| !(1..=65_535).contains(*port)) {
        Some(port) => Err(format!("there is no port {port}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::{MOST_PORTS, check_ports};

    #[test]
    fn ports_are_refused_that_are_none_or_too_many() {
        assert_eq!(check_ports(&[]), Ok(()));
        assert_eq!(check_ports(&[1, 65_535]), Ok(()));
        assert_eq!(check_ports(&vec![80; MOST_PORTS]), Ok(()));
        for wrong in [&[80, 0][..], &[-1], &[65_536], &vec![80; MOST_PORTS + 1]] {
            assert!(check_ports(wrong).is_err(), "{wrong:?}");
        }
    }
}
