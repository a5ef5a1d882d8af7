. .gpu/fi/setup_fi.sh
export PYTHONPATH=/tmp/repo:/tmp/site:/tmp/site_fi
python3 -c "import flashinfer; print(flashinfer.__version__)" 2>&1 | tail -1
export BEGUN=$(( $(cat /tmp/begun) - 45 ))
setsid bash /tmp/k/drive.sh "$1" "${2:-540}" > /tmp/o/drive.log 2>&1 < /dev/null &
sleep 1; tail -3 /tmp/o/drive.log
