"""What goes over the wire, and the clients that speak it: RTMP, media, ZMTP."""
