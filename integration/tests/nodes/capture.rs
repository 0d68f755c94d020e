//! Captures and parses Ethernet frames on the bridge between the nodes.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket, sockopt,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// A packet socket that receives the frames of one interface.
pub(crate) struct Capture {
    socket: OwnedFd,
    interface: usize,
}

/// An Ethernet frame.
pub(crate) struct Frame<'a> {
    pub(crate) to: String,
    pub(crate) from: String,
    kind: u16,
    payload: &'a [u8],
}

/// An IPv4 or IPv6 packet.
#[derive(Debug)]
pub(crate) struct Packet<'a> {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    /// Length including the headers, as the header states it.
    pub(crate) length: usize,
    protocol: u8,
    payload: &'a [u8],
}

/// A UDP datagram.
pub(crate) struct Datagram<'a> {
    pub(crate) to_port: u16,
    pub(crate) payload: &'a [u8],
}

// === impl Capture ===

impl Capture {
    /// Opens a capture on an interface in the network namespace of the calling thread.
    pub(crate) fn on(interface: &str) -> Self {
        let socket =
            socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::EthAll);
        let socket = socket.unwrap();
        setsockopt(&socket, sockopt::RcvBufForce, &(64 << 20)).unwrap();
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(200)).unwrap();
        Self { socket, interface: usize::try_from(if_nametoindex(interface).unwrap()).unwrap() }
    }

    /// Runs `work` and returns the frames in both directions meanwhile.
    pub(crate) fn during(&self, work: impl FnOnce()) -> Vec<Vec<u8>> {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut frames, mut buffer) = (Vec::new(), vec![0; 1 << 17]);
                loop {
                    match recvfrom::<LinkAddr>(self.socket.as_raw_fd(), &mut buffer) {
                        Ok((length, from)) if from.is_some_and(|from| from.ifindex() == self.interface) => {
                            frames.push(buffer[..length].to_vec());
                        }
                        Ok(_) => {}
                        Err(error) => {
                            assert_eq!(std::io::Error::from(error).kind(), ErrorKind::WouldBlock);
                            if done.load(Ordering::Relaxed) {
                                return frames;
                            }
                        }
                    }
                }
            });
            let worked = catch_unwind(AssertUnwindSafe(work));
            // The capture must end even if `work` panicked, because the scope waits for the reader.
            done.store(true, Ordering::Relaxed);
            worked.unwrap_or_else(|panic| resume_unwind(panic));
            reader.join().unwrap()
        })
    }
}

// === impl Frame ===

impl<'a> Frame<'a> {
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        let mac = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":");
        Self {
            to: mac(&bytes[..6]),
            from: mac(&bytes[6..12]),
            kind: u16::from_be_bytes([bytes[12], bytes[13]]),
            payload: &bytes[14..],
        }
    }

    /// The IP packet in the frame, if any.
    pub(crate) fn packet(&self) -> Option<Packet<'a>> {
        match self.kind {
            0x0800 | 0x86dd => Some(Packet::of(self.payload)),
            _ => None,
        }
    }
}

// === impl Packet ===

impl<'a> Packet<'a> {
    pub(crate) fn of(bytes: &'a [u8]) -> Self {
        let number = |at: usize| usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
        if bytes[0] >> 4 == 4 {
            let v4 = |at: usize| Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[at..at + 4]).unwrap()).into();
            let (header, length) = (usize::from(bytes[0] & 15) * 4, number(2));
            let payload = &bytes[header..length];
            return Self { from: v4(12), to: v4(16), length, protocol: bytes[9], payload };
        }
        let v6 = |at: usize| Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[at..at + 16]).unwrap()).into();
        let length = 40 + number(4);
        Self { from: v6(8), to: v6(24), length, protocol: bytes[6], payload: &bytes[40..length] }
    }

    /// The UDP datagram in the packet. The packet must not be a later fragment of an IPv4 datagram: such a fragment has no
    /// UDP header.
    pub(crate) fn datagram(&self) -> Option<Datagram<'a>> {
        let payload = self.payload;
        (self.protocol == 17).then(|| Datagram {
            to_port: u16::from_be_bytes([payload[2], payload[3]]),
            payload: &payload[8..],
        })
    }
}

// === impl Datagram ===

impl<'a> Datagram<'a> {
    /// VNI and inner frame of a VXLAN datagram (RFC 7348, section 5).
    pub(crate) fn vxlan(&self) -> (u32, Frame<'a>) {
        let header = &self.payload[..8];
        assert_eq!(
            (&header[..4], header[7]),
            (&[8, 0, 0, 0][..], 0),
            "the flags of a VXLAN header with a VNI"
        );
        (u32::from_be_bytes([0, header[4], header[5], header[6]]), Frame::of(&self.payload[8..]))
    }
}
